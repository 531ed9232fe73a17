/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * What the guest does with its devices. Each of these says one line that begins with "ok" or "bad" when it is asked for
 * by the host; those that begin a device say "bad" alone, and return whether it works.
 */
#ifndef DEVICES_H
#define DEVICES_H

#include "virtio.h"

#define TYPE_NET 1
#define TYPE_BLOCK 2
#define TYPE_FARLANE 38

/* What stands on a disk at an offset, a multiple of 8, that was written with this seed. */
uint64_t pattern(uint64_t seed, uint64_t offset);

/* Fills memory with what stands on a disk from an offset on. */
void fill(void *memory, uint64_t bytes, uint64_t seed, uint64_t offset);

/* Where memory is not what stands on a disk from an offset on; `bytes` when it is. */
uint64_t differs_at(const void *memory, uint64_t bytes, uint64_t seed, uint64_t offset);

/* A virtio disk: WRITES writes on each queue, which the host's test knows, too. */
bool blk_start(struct virtio_device *device);
void blk_begin(uint64_t seed);
void blk_end(void);
void blk_write(uint64_t seed);
void blk_read(uint64_t seed);
void blk_flush(void);

/* A network interface: it answers ARP, and sends datagrams back, whenever it is polled. */
bool net_start(struct virtio_device *device);
void net_poll(void);
void net_ask(void);
void net_settle(void);
void net_count(void);

/* The Farlane device: PING through its control queue. */
bool farlane_start(struct virtio_device *device);
void farlane_begin(void);
void farlane_end(void);

/* An NVMe controller. */
bool nvme_start(unsigned int slot);
void nvme_identify(void);
void nvme_write(uint64_t seed);
void nvme_read(uint64_t seed);

#endif
