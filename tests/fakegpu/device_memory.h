// Addresses of emulated device memory: each is reserved once and never reused, and the host cannot access it.
#pragma once
#include <stdbool.h>
#include <stddef.h>

#define MAX_COPIED (64 << 10) // larger copies and larger results of collectives move no bytes

// Reserve addresses. If the host accesses one of them, the error says that `function` allocated it.
void *reserve(size_t bytes, const char *function);

// Free the host memory that copies to these addresses have used; the addresses are not reused.
void discard(const void *start, size_t bytes);

// Release the reservation that begins at `start` and return its size; return 0 if there is none.
size_t release(const void *start, int *device);

// Count bytes as used on a GPU. If the GPU has too little memory left, record this and return false.
bool charge(int device, size_t bytes);
void refund(int device, size_t bytes);
size_t used_bytes(int device);

bool on_device(const void *address);

// The host address of the bytes that copies have written to a device address. A host address is returned as it is.
void *contents(const void *address);

// Remember, until the next kernel is launched, that these bytes are the result of a collective. Copies within the
// device that split up this result move bytes. All other copies within the device read what a kernel should have
// written, so they move nothing.
void keep_result(const void *start, size_t bytes);
bool is_result(const void *address);
