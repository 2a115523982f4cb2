// The functions of CUDA that are not emulated. The build lists the functions that torch's libraries import or cuda.h
// declares, but that no other file here defines. A call to such a function prints the function's name and ends the
// process. Without these definitions, the call would go to NVIDIA's library, which cannot use the emulated handles, and
// would crash without a message.
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
