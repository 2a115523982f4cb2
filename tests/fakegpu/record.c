#include "record.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

static Event *events;
static size_t count, capacity;
static atomic_bool on;
static atomic_long launches;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int device;

int current_device(void) { return device; }
void set_current_device(int value) { device = value; }
void count_launch(void) { launches++; }

void record(Event event) {
  if (!on) return;
  event.device = device;
  pthread_mutex_lock(&lock);
  if (count == capacity) {
    capacity = capacity ? 2 * capacity : 1 << 16;
    events = realloc(events, capacity * sizeof *events);
    if (!events) {
      perror("fakegpu: record");
      abort();
    }
  }
  events[count++] = event;
  pthread_mutex_unlock(&lock);
}

// recorder.py calls this.
void fakegpu_start(void) {
  pthread_mutex_lock(&lock);
  count = 0;
  on = true;
  pthread_mutex_unlock(&lock);
}

// The events remain valid until the next fakegpu_start.
size_t fakegpu_stop(const Event **recorded) {
  pthread_mutex_lock(&lock);
  on = false;
  *recorded = events;
  pthread_mutex_unlock(&lock);
  return count;
}

long fakegpu_launches(void) { return launches; }
