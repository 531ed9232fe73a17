/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * libfarlane_io: plain read and write calls with device memory.
 *
 * Preloaded, the library serves read, write and their like for buffers in device memory. Mappings
 * of PCI BARs (/sys/bus/pci/devices/.../resourceN) and of P2PDMA memory (.../p2pmem/allocate) are
 * registered by themselves; other device memory is registered by these functions. A program that
 * is to run without the library too looks them up with dlsym(RTLD_DEFAULT, ...).
 */
#ifndef FARLANE_IO_H
#define FARLANE_IO_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes moved between files and device memory since the program began. */
struct farlane_io_totals {
	uint64_t cache;      /* through the page cache */
	uint64_t read_ahead; /* through pages that read-ahead brought */
	uint64_t p2p;        /* by direct I/O between disk and device memory */
	uint64_t requests;   /* calls */
};

/*
 * Registers `length` bytes of device memory at `address`. `provider` is "soft" (a mapped BAR),
 * "p2pmem" or "cuda"; NULL means "soft". Returns zero, or -EINVAL (no range, no such provider),
 * -EEXIST (overlaps memory that was registered), -ENOSPC (too many ranges), -ENODEV (the
 * provider's driver is not there). CUDA memory that was recognised without gives way.
 */
int farlane_io_register(void *address, size_t length, const char *provider);

/*
 * Unregisters what was registered at `address`. Returns zero when no I/O is under way in it any
 * more, or -ENOENT. Unmapping registered memory does the same.
 */
int farlane_io_unregister(void *address);

/* Writes the totals to `*totals`. */
void farlane_io_stats(struct farlane_io_totals *totals);

#ifdef __cplusplus
}
#endif

#endif
