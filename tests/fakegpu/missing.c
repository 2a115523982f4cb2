// Functions of CUDA that are not emulated. The build lists those that torch's libraries import or cuda.h declares and that no
// other file here defines; a call ends the process with the function's name. Without them such a call would reach NVIDIA's
// library, which knows none of our handles, and crash without a word.
#include <stdio.h>
#include <stdlib.h>

static void end(const char *name) {
  fprintf(stderr, "fakegpu: %s was called and is not emulated; tests/fakegpu/README.md says how to add it\n", name);
  abort();
}

#define MISSING(name)                                                                                                  \
  void name(void) { end(#name); }
#include "missing.inc"
#undef MISSING
