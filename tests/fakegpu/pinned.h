// Page-locked host memory: ordinary memory in a range of addresses of its own, by which it is recognized.
#pragma once
#include <stdbool.h>
#include <stddef.h>

void *pin(size_t bytes); // NULL if the machine has no memory left
void unpin(void *address);
bool is_pinned(const void *address);
