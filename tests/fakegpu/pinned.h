// Page-locked host memory: ordinary memory at addresses by which it is known.
#pragma once
#include <stdbool.h>
#include <stddef.h>

void *pin(size_t bytes); // NULL if the machine has none left
void unpin(void *address);
bool is_pinned(const void *address);
