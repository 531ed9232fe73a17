// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* The same for a device of the kernel, with the distribution's library alone. */
#define WITHOUT_BUFFER
#include "fatal.c"
