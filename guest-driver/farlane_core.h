/* SPDX-License-Identifier: GPL-2.0 */
/* What farlane.ko offers to modules that serve the verbs of its device. */
#ifndef FARLANE_CORE_H
#define FARLANE_CORE_H

#include <linux/auxiliary_bus.h>
#include <linux/if_ether.h>
#include <linux/types.h>

struct farlane;
struct farlane_context;
struct page;

/* Name of the auxiliary device behind that of the module. */
#define FARLANE_VERBS_DEVICE "verbs"

/*
 * The auxiliary device of a virtio device that serves the verbs to a driver of the kernel. Its
 * parent is the virtio device; it goes before that does.
 */
struct farlane_verbs {
	struct auxiliary_device adev;
	struct farlane *fl;
	u8 mac[ETH_ALEN];	/* of the network interface that it belongs to; zero for none */
	u32 max_events;		/* event indices of a context */
	u32 max_regions;	/* of a context */
};

/*
 * Who is told of what happens to a context. Both are called with interrupts off and a lock of
 * farlane.ko held, so that neither is called any more when farlane_client_close() returns. They
 * call nothing of this file but farlane_client_doorbell().
 */
struct farlane_client {
	/* The backend has raised an event of this index, which is below max_events. */
	void (*event)(void *data, u32 index);
	/* The device is dead. Once, but for a context that is opened at that moment. */
	void (*dead)(void *data);
};

/* Kernel memory that the backend has, too, as FARLANE_KIND_SEGMENT. */
struct farlane_shared {
	u32 region;
	unsigned long npages;
	struct page **pages;	/* each with a page frame of its own; until it is detached */
};

struct farlane_context *farlane_client_open(struct farlane *fl, bool charged,
					    const struct farlane_client *client, void *data);
void farlane_client_close(struct farlane_context *ctx);
int farlane_client_segment(struct farlane_context *ctx, u64 length,
			   struct farlane_shared *shared);
int farlane_client_pin(struct farlane_context *ctx, u64 address, u64 length, bool writable,
		       u32 *region);
int farlane_client_all_memory(struct farlane_context *ctx, u32 *region);
int farlane_client_detach(struct farlane_context *ctx, u32 region);
int farlane_client_doorbell(struct farlane *fl);
int farlane_client_gid(struct farlane *fl, u32 op, u32 index, const u8 gid[16]);
void farlane_client_condemn(struct farlane *fl, const char *why);
bool farlane_client_is_dead(struct farlane *fl);
void farlane_client_wait_reset(struct farlane *fl);

#endif
