// Emulates page-locked host memory. Nothing is locked, so a process may use more memory than it could really lock.
#define _GNU_SOURCE
#include "pinned.h"

#include <pthread.h>
#include <sys/mman.h>

#define SPACE (1ULL << 42) // 4 TiB of addresses
#define PAGE 4096ULL

static char *base;
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// The page before an allocation contains its length.
void *pin(size_t bytes) {
  size_t length = PAGE + (bytes + PAGE - 1) / PAGE * PAGE;
  pthread_mutex_lock(&lock);
  if (!base) {
    base = mmap(NULL, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) base = NULL;
  }
  char *start = base && used + length <= SPACE ? base + used : NULL;
  if (start) used += length;
  pthread_mutex_unlock(&lock);
  if (!start || mprotect(start, length, PROT_READ | PROT_WRITE)) return NULL;
  *(size_t *)start = length;
  return start + PAGE;
}

void unpin(void *address) {
  if (!is_pinned(address)) return;
  char *start = (char *)address - PAGE;
  size_t length = *(size_t *)start;
  madvise(start, length, MADV_DONTNEED);
  mprotect(start, length, PROT_NONE);
}

bool is_pinned(const void *address) { return base && (char *)address >= base && (char *)address < base + SPACE; }
