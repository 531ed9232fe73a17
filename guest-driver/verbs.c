// SPDX-License-Identifier: GPL-2.0
/*
 * The verbs of a device, for a driver of the kernel: an auxiliary device that farlane_ib.ko binds
 * to, and what it needs of this module.
 */
#include <linux/delay.h>
#include <linux/etherdevice.h>
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "farlane.h"
#include "farlane_verbs_abi.h"

/* How often a backend is asked to let go of memory that is in use still. */
#define DETACH_TRIES 20

#if IS_ENABLED(CONFIG_AUXILIARY_BUS)

static DEFINE_IDA(farlane_verbs_ids);

static void farlane_verbs_release(struct device *dev)
{
	struct farlane_verbs *verbs = container_of(dev, struct farlane_verbs, adev.dev);

	ida_free(&farlane_verbs_ids, verbs->adev.id);
	put_device(&verbs->fl->dev);
	kfree(verbs);
}

/* Makes the auxiliary device where there is something to serve. The others work without it. */
void farlane_verbs_add(struct farlane *fl)
{
	struct farlane_verbs *verbs;
	int id, err = -ENOMEM;

	if (!(fl->features & FARLANE_FEATURE_VERBS))
		return;
	verbs = kzalloc(sizeof(*verbs), GFP_KERNEL);
	if (!verbs)
		goto failed;
	id = ida_alloc(&farlane_verbs_ids, GFP_KERNEL);
	if (id < 0) {
		err = id;
		kfree(verbs);
		goto failed;
	}
	verbs->fl = fl;
	verbs->max_events = fl->max_events;
	verbs->max_regions = fl->max_regions;
	ether_addr_copy(verbs->mac, fl->mac);
	verbs->adev.id = id;
	verbs->adev.name = FARLANE_VERBS_DEVICE;
	verbs->adev.dev.parent = &fl->vdev->dev;
	verbs->adev.dev.release = farlane_verbs_release;
	err = auxiliary_device_init(&verbs->adev);
	if (err) {
		ida_free(&farlane_verbs_ids, id);
		kfree(verbs);
		goto failed;
	}
	get_device(&fl->dev);
	err = auxiliary_device_add(&verbs->adev);
	if (err) {
		auxiliary_device_uninit(&verbs->adev);
		goto failed;
	}
	fl->verbs = verbs;
	return;
failed:
	dev_warn(&fl->dev, "no verbs for drivers of the kernel: %d\n", err);
}

void farlane_verbs_del(struct farlane *fl)
{
	if (!fl->verbs)
		return;
	auxiliary_device_delete(&fl->verbs->adev);
	auxiliary_device_uninit(&fl->verbs->adev);
	fl->verbs = NULL;
}

#else

void farlane_verbs_add(struct farlane *fl)
{
}

void farlane_verbs_del(struct farlane *fl)
{
}

#endif

/**
 * farlane_client_open - open a context of the backend
 * @fl: device
 * @charged: its memory is charged to the process that calls for it; else it is the kernel's own
 * @client: who is told of its events
 * @data: passed to those functions
 *
 * Return: the context, or an error number: -ENODEV of a dead device.
 */
struct farlane_context *farlane_client_open(struct farlane *fl, bool charged,
					    const struct farlane_client *client, void *data)
{
	struct farlane_context *ctx = farlane_context_new(fl);
	int err;

	if (!ctx)
		return ERR_PTR(-ENOMEM);
	ctx->client = client;
	ctx->client_data = data;
	ctx->charged = charged;
	err = farlane_context_open(ctx);
	return err ? ERR_PTR(err) : ctx;
}
EXPORT_SYMBOL_GPL(farlane_client_open);

/**
 * farlane_client_close - close a context
 * @ctx: context, which nobody else uses
 *
 * All its memory is detached then; pages that a process has mapped live on in that mapping.
 */
void farlane_client_close(struct farlane_context *ctx)
{
	farlane_context_close(ctx);
	farlane_context_free(ctx);
}
EXPORT_SYMBOL_GPL(farlane_client_close);

/**
 * farlane_client_segment - share kernel memory with the backend
 * @ctx: context; its first segment is its header
 * @length: in bytes, at most FARLANE_MAX_SEGMENT_BYTES, rounded up to pages
 * @shared: gets what was allocated, zeroed
 *
 * Return: 0 or an error number.
 */
int farlane_client_segment(struct farlane_context *ctx, u64 length,
			   struct farlane_shared *shared)
{
	struct farlane_region *region = farlane_segment_new(ctx, length);

	if (IS_ERR(region))
		return PTR_ERR(region);
	shared->region = region->id;
	shared->npages = region->npages;
	shared->pages = region->pages;
	farlane_region_live(ctx, region);
	return 0;
}
EXPORT_SYMBOL_GPL(farlane_client_segment);

/**
 * farlane_client_pin - pin memory of the calling process for the backend
 * @ctx: context
 * @address: of the first byte
 * @length: in bytes
 * @writable: the backend may write it
 * @region: gets its id
 *
 * Return: 0 or an error number.
 */
int farlane_client_pin(struct farlane_context *ctx, u64 address, u64 length, bool writable,
		       u32 *region)
{
	struct farlane_pin arg = {
		.address = address,
		.length = length,
		.flags = writable ? FARLANE_FLAG_WRITABLE : 0,
	};
	int err = farlane_pin(ctx, &arg);

	*region = arg.region;
	return err;
}
EXPORT_SYMBOL_GPL(farlane_client_pin);

/**
 * farlane_client_all_memory - let the backend have all memory, for requests of the kernel
 * @ctx: context of the kernel's own
 * @region: gets its id
 *
 * Return: 0 or an error number.
 */
int farlane_client_all_memory(struct farlane_context *ctx, u32 *region)
{
	struct farlane_region *all = farlane_region_new(FARLANE_KIND_ALL_MEMORY,
							FARLANE_FLAG_WRITABLE, 0, 0);
	int err;

	if (!all)
		return -ENOMEM;
	err = farlane_attach(ctx, all);
	if (err)
		return err;
	*region = all->id;
	farlane_region_live(ctx, all);
	return 0;
}
EXPORT_SYMBOL_GPL(farlane_client_all_memory);

/**
 * farlane_client_detach - take memory away from the backend, and let go of it
 * @ctx: context
 * @region: id of the segment or pin
 *
 * Return: 0; an error number where the backend refuses: it goes with the context then.
 */
int farlane_client_detach(struct farlane_context *ctx, u32 region)
{
	unsigned int tries = 0;
	int err;

	/* A request that the backend is at may use what is ended for all that come. */
	while ((err = farlane_detach(ctx, region)) == -EBUSY && ++tries < DETACH_TRIES)
		msleep(FARLANE_AGAIN_MS);
	return farlane_let_go(err) ? 0 : err;
}
EXPORT_SYMBOL_GPL(farlane_client_detach);

/**
 * farlane_client_doorbell - wake the backend
 * @fl: device
 *
 * In any context. Return: 0, or -ENODEV of a dead device.
 */
int farlane_client_doorbell(struct farlane *fl)
{
	return farlane_ring_doorbell(fl);
}
EXPORT_SYMBOL_GPL(farlane_client_doorbell);

/**
 * farlane_client_gid - change the port's GID table
 * @fl: device
 * @op: FARLANE_OP_ADD_GID or FARLANE_OP_DEL_GID
 * @index: in the table
 * @gid: to be added
 *
 * Return: 0 or the error number of the backend.
 */
int farlane_client_gid(struct farlane *fl, u32 op, u32 index, const u8 gid[16])
{
	struct farlane_call *call = kzalloc(sizeof(*call), GFP_KERNEL);
	int err;

	if (!call)
		return -ENOMEM;
	call->request.op = cpu_to_le32(op);
	call->request.region = cpu_to_le32(index);
	/* The bytes, in their order. */
	if (op == FARLANE_OP_ADD_GID) {
		memcpy(&call->request.address, gid, 8);
		memcpy(&call->request.length, gid + 8, 8);
	}
	err = farlane_call(fl, call, NULL, 0);
	kfree(call);
	return err;
}
EXPORT_SYMBOL_GPL(farlane_client_gid);

/**
 * farlane_client_condemn - declare the device dead, and wait until it has been reset
 * @fl: device, with a context that is open
 * @why: reason for the log
 */
void farlane_client_condemn(struct farlane *fl, const char *why)
{
	farlane_condemn(fl, why);
}
EXPORT_SYMBOL_GPL(farlane_client_condemn);

/**
 * farlane_client_is_dead - whether the device is dead
 * @fl: device
 */
bool farlane_client_is_dead(struct farlane *fl)
{
	return READ_ONCE(fl->dead);
}
EXPORT_SYMBOL_GPL(farlane_client_is_dead);

/**
 * farlane_client_wait_reset - wait until a device touches no memory any more
 * @fl: device, dead
 */
void farlane_client_wait_reset(struct farlane *fl)
{
	wait_for_completion(&fl->quiesced);
}
EXPORT_SYMBOL_GPL(farlane_client_wait_reset);
