// SPDX-License-Identifier: GPL-2.0
/*
 * Whom a completion is told to. farlane.ko says with interrupts off and its lock held that a queue
 * has had an event; whoever waits is called from a tasklet, without a lock.
 */
#include <linux/bitmap.h>
#include <linux/slab.h>

#include "ib.h"

/* An event index for a completion queue; several may have the same. */
u32 fv_cq_event_index(struct fv_context *ctx)
{
	u32 channels = ctx->dev->max_events - FARLANE_EVENT_FIRST_CHANNEL;
	u32 index;

	spin_lock_bh(&ctx->cqs_lock);
	index = FARLANE_EVENT_FIRST_CHANNEL + ctx->last_event++ % channels;
	spin_unlock_bh(&ctx->cqs_lock);
	return index;
}

/* Its completions, and the death of the device, are told of from now on. As fv_object_add(). */
void fv_cq_add(struct fv_cq *cq)
{
	struct fv_context *ctx = cq->ctx;

	refcount_set(&cq->refs, 1);
	init_completion(&cq->idle);
	spin_lock_bh(&ctx->cqs_lock);
	hash_add(ctx->cqs_by_event, &cq->link, cq->event);
	spin_unlock_bh(&ctx->cqs_lock);
	/* It was not there when the others were told. Pairs with the lock of fv_tell(). */
	if (READ_ONCE(ctx->dead))
		fv_tell_soon(ctx);
}

static void fv_cq_put(struct fv_cq *cq)
{
	if (refcount_dec_and_test(&cq->refs))
		complete(&cq->idle);
}

/* Nobody is told any more when this returns. */
void fv_cq_del(struct fv_cq *cq)
{
	spin_lock_bh(&cq->ctx->cqs_lock);
	hash_del(&cq->link);
	spin_unlock_bh(&cq->ctx->cqs_lock);
	fv_cq_put(cq);
	wait_for_completion(&cq->idle);
}

/* Under cqs_lock: whether its control block says that it has had an event. */
static bool fv_cq_has_event(struct fv_cq *cq)
{
	const __le32 *word = cq->control.base + FARLANE_CONTROL_OFF_EVENTS;
	u32 events = le32_to_cpu(READ_ONCE(*word));

	if (events == cq->events)
		return false;
	cq->events = events;
	return true;
}

/*
 * Under cqs_lock: whether it has to hear that the device is dead. A process does once, whether it
 * waits or not; the kernel's own, once its requests are ended, as often as it waits.
 */
static bool fv_cq_hears_end(struct fv_cq *cq)
{
	if (fv_is_kernel(cq->ctx))
		return READ_ONCE(cq->ctx->is_over) && fv_cq_wants_end(cq);
	if (cq->was_told)
		return false;
	cq->was_told = true;
	return true;
}

/* The tasklet, which runs once at a time. */
static void fv_tell(struct tasklet_struct *tasklet)
{
	struct fv_context *ctx = container_of(tasklet, struct fv_context, tasklet);
	bool dead = READ_ONCE(ctx->dead);
	struct fv_cq *cq, *next;
	LIST_HEAD(told);
	u32 index;
	int bucket;

	spin_lock(&ctx->cqs_lock);
	for_each_set_bit(index, ctx->events, ctx->dev->max_events) {
		/* Before the words are looked at. */
		if (!test_and_clear_bit(index, ctx->events))
			continue;
		hash_for_each_possible(ctx->cqs_by_event, cq, link, index) {
			if (cq->event == index && !cq->is_told && fv_cq_has_event(cq)) {
				cq->is_told = true;
				refcount_inc(&cq->refs);
				list_add_tail(&cq->told, &told);
			}
		}
	}
	if (dead) {
		hash_for_each(ctx->cqs_by_event, bucket, cq, link) {
			if (!cq->is_told && fv_cq_hears_end(cq)) {
				cq->is_told = true;
				refcount_inc(&cq->refs);
				list_add_tail(&cq->told, &told);
			}
		}
	}
	spin_unlock(&ctx->cqs_lock);

	list_for_each_entry_safe(cq, next, &told, told) {
		ib_comp_handler handler = READ_ONCE(cq->ib.comp_handler);

		cq->is_told = false;
		if (handler)
			handler(&cq->ib, cq->ib.cq_context);
		fv_cq_put(cq);
	}
}

/* In any context. */
void fv_tell_soon(struct fv_context *ctx)
{
	tasklet_schedule(&ctx->tasklet);
}

/* In any context: a queue of this event index has had an event. */
void fv_tell_event(struct fv_context *ctx, u32 index)
{
	set_bit(index, ctx->events);
	fv_tell_soon(ctx);
}

int fv_tell_init(struct fv_context *ctx)
{
	spin_lock_init(&ctx->cqs_lock);
	hash_init(ctx->cqs_by_event);
	tasklet_setup(&ctx->tasklet, fv_tell);
	ctx->events = bitmap_zalloc(ctx->dev->max_events, GFP_KERNEL_ACCOUNT);
	return ctx->events ? 0 : -ENOMEM;
}

/* No event comes any more, and there are no queues. */
void fv_tell_exit(struct fv_context *ctx)
{
	tasklet_kill(&ctx->tasklet);
	bitmap_free(ctx->events);
}
