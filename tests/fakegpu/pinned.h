// Page-locked host memory. It is ordinary memory that is recognized by its separate range of addresses.
#pragma once
#include <stdbool.h>
#include <stddef.h>

void *pin(size_t bytes); // NULL if the machine has no memory left
void unpin(void *address);
bool is_pinned(const void *address);
