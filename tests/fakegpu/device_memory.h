// Addresses of emulated device memory: reserved, without access, never used twice.
#pragma once
#include <stdbool.h>
#include <stddef.h>

#define CARRIED (64 << 10) // bytes of a copy or of a collective's result that really move, at most

// Reserve addresses. `maker` is named if the host touches them.
void *reserve(size_t bytes, const char *maker);

// Give back what the copies into them occupied; the addresses are not used again.
void discard(const void *start, size_t bytes);

// Bytes of the reservation that begins there and is marked as released; 0 if none.
size_t release(const void *start, int *device);

// Account for bytes of a GPU. False beyond its memory, which is recorded.
bool charge(int device, size_t bytes);
void refund(int device, size_t bytes);
size_t used_bytes(int device);

bool on_device(const void *address);

// Where the bytes of a device address are kept, if anything was copied there; a host address is itself.
void *contents(const void *address);

// What a collective has left at an address, until the next kernel is launched: a copy on the device is to split it up. Other
// copies on the device start from what a kernel should have written, and leave their target as it is.
void keep_result(const void *start, size_t bytes);
bool is_result(const void *address);
