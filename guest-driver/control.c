// SPDX-License-Identifier: GPL-2.0
/* The control queue: requests to the backend and their answers. */
#include <linux/delay.h>
#include <linux/scatterlist.h>

#include "farlane.h"

/* How often a backend is asked again before the log says so: seconds. */
#define AGAIN_TOLD 500

/* Largest error number that a backend may report: EHWPOISON. */
#define MAX_STATUS 133

/* Why a device is condemned whose contexts a backend knows nothing of. */
static const char another[] = "the backend is another one";

/*
 * Each answer names the generation of the device that gives it: a VMM may have connected to another
 * backend, which knows nothing of the contexts that are open. Where there are none nothing is lost.
 * Under control_lock.
 */
static void farlane_answered(struct farlane *fl, struct farlane_call *call)
{
	u64 generation = le64_to_cpu(call->reply.value);

	if (call->written < sizeof(call->reply))
		return;
	if (generation != fl->generation) {
		if (fl->opened) {
			/* A reason that stands does not go with the contexts. */
			if (!fl->condemned)
				fl->condemned = another;
		} else {
			fl->generation = generation;
			/* Contexts of the last one were open, and are not any more. */
			if (fl->condemned == another)
				fl->condemned = NULL;
		}
	}
	if (call->request.op == cpu_to_le32(FARLANE_OP_OPEN) &&
	    !call->reply.status)
		fl->opened++;
}

void farlane_control_done(struct virtqueue *vq)
{
	struct farlane *fl = vq->vdev->priv;
	struct farlane_call *call;
	unsigned long flags;
	unsigned int len;

	spin_lock_irqsave(&fl->control_lock, flags);
	do {
		virtqueue_disable_cb(vq);
		while ((call = virtqueue_get_buf(vq, &len))) {
			list_del_init(&call->link);
			call->written = len;
			farlane_answered(fl, call);
			complete(&call->done);
		}
	} while (!virtqueue_is_broken(vq) && !virtqueue_enable_cb(vq));
	spin_unlock_irqrestore(&fl->control_lock, flags);
}

static int farlane_submit(struct farlane *fl, struct farlane_call *call,
			  struct farlane_extent *extents, u32 count)
{
	struct scatterlist request, list, reply;
	struct scatterlist *sgs[3];
	unsigned int out = 0;
	int err;

	sg_init_one(&request, &call->request, sizeof(call->request));
	sgs[out++] = &request;
	if (count) {
		sg_init_one(&list, extents, count * sizeof(*extents));
		sgs[out++] = &list;
	}
	memset(&call->reply, 0, sizeof(call->reply));
	sg_init_one(&reply, &call->reply, sizeof(call->reply));
	sgs[out] = &reply;

	init_completion(&call->done);
	call->ticks = 0;
	call->err = 0;
	call->written = 0;

	spin_lock_irq(&fl->control_lock);
	err = -ENODEV;
	if (!fl->dead) {
		err = virtqueue_add_sgs(fl->control_vq, sgs, out, 1, call,
					GFP_ATOMIC);
		if (!err) {
			list_add_tail(&call->link, &fl->calls);
			virtqueue_kick(fl->control_vq);
		}
	}
	spin_unlock_irq(&fl->control_lock);
	return err;
}

/**
 * farlane_call - send a control request and wait for its answer
 * @fl: device
 * @call: with the request filled in
 * @extents: kmalloc'ed, follow the request
 * @count: number of extents
 *
 * Waits uninterruptibly, since the backend may use the memory that a request is about until it has
 * answered; the watchdog bounds the wait.
 *
 * Return: 0; -ENODEV when the device is dead, and then it has been reset and touches no memory any
 * more; another negative error number as the backend reported it.
 */
int farlane_call(struct farlane *fl, struct farlane_call *call,
		 struct farlane_extent *extents, u32 count)
{
	u32 status;
	int err;

	call->request.extents = cpu_to_le32(count);
	down(&fl->slots);
	err = farlane_submit(fl, call, extents, count);
	if (!err) {
		wait_for_completion(&call->done);
		err = call->err;
	} else if (err == -ENODEV) {
		wait_for_completion(&fl->quiesced);
	}
	up(&fl->slots);
	if (err)
		return err;
	if (call->written < sizeof(call->reply))
		return -EIO;
	status = le32_to_cpu(call->reply.status);
	/* -ENODEV from here has a meaning that a backend cannot give it. */
	if (status > MAX_STATUS || status == ENODEV)
		return -EIO;
	return -(int)status;
}

int farlane_simple_call(struct farlane_context *ctx, struct farlane_call *call,
			u32 op, u32 region, u64 address, u64 length)
{
	call->request = (struct farlane_request) {
		.op = cpu_to_le32(op),
		.context = cpu_to_le32(ctx->id),
		.region = cpu_to_le32(region),
		.address = cpu_to_le64(address),
		.length = cpu_to_le64(length),
	};
	return farlane_call(ctx->fl, call, NULL, 0);
}

/**
 * farlane_take_away - tell the backend that a region or a context goes
 * @ctx: context
 * @call: whose memory is used
 * @op: FARLANE_OP_DETACH or FARLANE_OP_CLOSE
 * @region: the region for DETACH
 *
 * Disks may take as long as they like for what is under way in that memory. A backend that waits
 * for them answers -EAGAIN meanwhile, so that it is not found dead, and is asked again.
 *
 * Return: as farlane_call(); see farlane_let_go().
 */
int farlane_take_away(struct farlane_context *ctx, struct farlane_call *call,
		      u32 op, u32 region)
{
	unsigned int tries = 0;
	int err;

	while ((err = farlane_simple_call(ctx, call, op, region, 0, 0)) == -EAGAIN) {
		farlane_late(ctx->fl, ++tries);
		msleep(FARLANE_AGAIN_MS);
	}
	return err;
}

/* So many times in a row the backend could not let go yet. */
void farlane_late(struct farlane *fl, unsigned int tries)
{
	if (tries == AGAIN_TOLD)
		dev_warn(&fl->dev, "memory goes that a disk still uses\n");
}
