// SPDX-License-Identifier: GPL-2.0
/*
 * A context of the backend: calls, doorbells and events. Its header is in memory that the backend
 * has, too, and no process. zero-copy/abi/src/arena.rs says what lies where, and who sleeps when.
 */
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "ib.h"

/* Largest error number that a backend may report: EHWPOISON. */
#define MAX_STATUS 133

/*
 * Seconds after which a backend is dead that has not answered a call. It may have to wait for what
 * is under way in memory that goes. Each is waited for on its own, so that a paused VM does not
 * find its backend dead.
 */
#define CALL_SECONDS 60

static __le32 *fv_word(struct fv_context *ctx, u32 offset)
{
	return ctx->base + offset;
}

static u32 fv_load(struct fv_context *ctx, u32 offset)
{
	return le32_to_cpu(smp_load_acquire(fv_word(ctx, offset)));
}

static void fv_store(struct fv_context *ctx, u32 offset, u32 value)
{
	smp_store_release(fv_word(ctx, offset), cpu_to_le32(value));
}

/* What was published before is work for the backend. In any context. */
void fv_wake_backend(struct fv_context *ctx)
{
	/* Pairs with the backend's fence between saying that it sleeps and looking once more. */
	smp_mb();
	if (READ_ONCE(*fv_word(ctx, FARLANE_OFF_BACKEND_STATE)) ==
	    cpu_to_le32(FARLANE_BACKEND_SLEEPING))
		farlane_client_doorbell(ctx->dev->fl);
}

static void fv_set_bit(struct fv_context *ctx, u32 offset, u32 bit)
{
	__le32 mask = cpu_to_le32(1U << (bit % 32));

	atomic_or((__force int)mask, (atomic_t *)fv_word(ctx, offset + bit / 32 * 4));
}

/*
 * A request was published in the queue of this slot. The backend looks at queues that had
 * something to do lately; of another one it has to be told.
 */
void fv_ring_queue(struct fv_context *ctx, struct fv_control *control, u32 slot)
{
	__le32 *state = control->base + FARLANE_CONTROL_OFF_BACKEND_STATE;

	/* Pairs with the backend's fence between saying that it does not look and looking. */
	smp_mb();
	if (READ_ONCE(*state) == cpu_to_le32(FARLANE_BACKEND_SLEEPING)) {
		fv_set_bit(ctx, FARLANE_OFF_RUNG, slot);
		/* Cleared in the reverse order. */
		smp_mb();
		fv_set_bit(ctx, FARLANE_OFF_RUNG_SUMMARY, slot / 32);
	}
	fv_wake_backend(ctx);
}

/*
 * A queue pair is in error. The backend flushes what the kernel posts from now on when it is
 * told, and is told here of what was posted before that was known. In any context.
 */
void fv_qp_breaks(struct fv_qp *qp)
{
	if (READ_ONCE(qp->in_error))
		return;
	WRITE_ONCE(qp->in_error, true);
	/* Begins with a barrier, which pairs with that of fv_posted(). */
	fv_ring_queue(qp->ctx, &qp->control, fv_handle_slot(qp->handle));
}

/* Under turn: waits for the call that was submitted last. */
static int fv_wait(struct fv_context *ctx)
{
	u32 before = ctx->submitted - 1;
	unsigned int seconds = 0;

	fv_store(ctx, FARLANE_OFF_CALLER_WAITING, 1);
	fv_wake_backend(ctx);
	while (!wait_event_timeout(ctx->wait,
				   fv_load(ctx, FARLANE_OFF_CALL_COMPLETED) != before ||
				   READ_ONCE(ctx->dead), HZ)) {
		/* Bounds the harm of a backend that does not keep to the protocol. */
		fv_wake_backend(ctx);
		if (++seconds == CALL_SECONDS)
			farlane_client_condemn(ctx->dev->fl, "a call is not answered");
	}
	fv_store(ctx, FARLANE_OFF_CALLER_WAITING, 0);
	if (fv_load(ctx, FARLANE_OFF_CALL_COMPLETED) == before)
		return -ENODEV;
	if (fv_load(ctx, FARLANE_OFF_CALL_COMPLETED) != ctx->submitted)
		return -EPROTO;
	return 0;
}

/* Under turn: makes a call, and reads the answer. */
static int fv_call_locked(struct fv_context *ctx, u32 number, const void *args,
			  size_t args_bytes, void *result, size_t result_bytes)
{
	u32 slot = ctx->submitted % FARLANE_CALL_SLOTS;
	void *head = ctx->base + FARLANE_OFF_CALL_RING + slot * FARLANE_CALL_SLOT_BYTES;
	void *payload = head + sizeof(struct farlane_call_header);
	struct farlane_call_header header = {
		.number = cpu_to_le32(number),
		.length = cpu_to_le32(args_bytes),
	};
	u32 status;
	int err;

	memcpy(head, &header, sizeof(header));
	memcpy(payload, args, args_bytes);
	fv_store(ctx, FARLANE_OFF_CALL_SUBMITTED, ++ctx->submitted);
	err = fv_wait(ctx);
	if (err)
		return err;
	memcpy(&header, head, sizeof(header));
	status = le32_to_cpu(header.status);
	if (status)
		return status > MAX_STATUS || status == ENODEV ? -EIO : -(int)status;
	if (le32_to_cpu(header.length) != result_bytes)
		return -EPROTO;
	memcpy(result, payload, result_bytes);
	return 0;
}

/**
 * fv_call - make a call of the verbs
 * @ctx: context that makes it
 * @number: FARLANE_CALL_*
 * @args: its arguments, @args_bytes of at most FARLANE_CALL_PAYLOAD_BYTES
 * @args_bytes: their length
 * @result: gets the result
 * @result_bytes: its length
 *
 * Waits uninterruptibly: what a call has made must not be forgotten.
 *
 * Return: 0; -ENODEV of a dead device; another error number as the backend reports it.
 */
int fv_call(struct fv_context *ctx, u32 number, const void *args, size_t args_bytes,
	    void *result, size_t result_bytes)
{
	struct farlane *fl = ctx->dev->fl;
	bool breaks = false;
	int err;

	might_sleep();
	mutex_lock(&ctx->turn);
	if (READ_ONCE(ctx->dead) || ctx->broken) {
		err = -ENODEV;
	} else {
		err = fv_call_locked(ctx, number, args, args_bytes, result, result_bytes);
		breaks = err == -EPROTO;
		ctx->broken = breaks;
	}
	mutex_unlock(&ctx->turn);
	/* Nobody knows what such a backend still does with whose memory. */
	if (breaks)
		farlane_client_condemn(fl, "the ring of calls is out of order");
	return err;
}

/* A call about one object, without a result. */
int fv_handle_call(struct fv_context *ctx, u32 number, u32 handle)
{
	__le32 arg = cpu_to_le32(handle);

	return fv_call(ctx, number, &arg, sizeof(arg), NULL, 0);
}

/**
 * fv_destroy_call - end an object
 * @ctx: its context
 * @number: FARLANE_CALL_*
 * @handle: object
 *
 * Return: 0, and it is gone, as all are of a dead device when that has been reset; -EBUSY where
 * something of the same process still uses it. A backend that refuses for another reason is dead:
 * nobody knows what it does with whose memory.
 */
int fv_destroy_call(struct fv_context *ctx, u32 number, u32 handle)
{
	int err = fv_handle_call(ctx, number, handle);

	if (!err)
		return 0;
	/*
	 * Until then the backend may use the object, and memory by it. Whoever finds the device dead,
	 * or the ring of calls broken, sees to its reset, and needs no lock of those who end objects.
	 */
	if (err == -ENODEV) {
		farlane_client_wait_reset(ctx->dev->fl);
		return 0;
	}
	/* The kernel takes no refusal. */
	if (err == -EBUSY && !fv_is_kernel(ctx))
		return err;
	ibdev_err(&ctx->dev->ib, "call %u of object %u: %d\n", number, handle, err);
	farlane_client_condemn(ctx->dev->fl, "an object cannot be destroyed");
	return 0;
}

/*
 * Under objects_lock: the object has events from now on. Nothing that may fail comes after this:
 * the RDMA core frees an object that cannot be created without looking for events it has had.
 */
int fv_object_add_locked(struct xarray *objects, u32 handle, void *object)
{
	int err = xa_insert(objects, handle, object, GFP_KERNEL_ACCOUNT);

	/* A backend that names two objects alike. */
	return err == -EBUSY ? -EPROTO : err;
}

int fv_object_add(struct fv_context *ctx, struct xarray *objects, u32 handle, void *object)
{
	int err;

	mutex_lock(&ctx->objects_lock);
	err = fv_object_add_locked(objects, handle, object);
	mutex_unlock(&ctx->objects_lock);
	return err;
}

void fv_object_del(struct fv_context *ctx, struct xarray *objects, u32 handle)
{
	mutex_lock(&ctx->objects_lock);
	xa_erase(objects, handle);
	mutex_unlock(&ctx->objects_lock);
}

static void fv_event(void *data, u32 index)
{
	struct fv_context *ctx = data;

	if (index == FARLANE_EVENT_WAKE)
		wake_up_all(&ctx->wait);
	else if (index == FARLANE_EVENT_ASYNC)
		queue_work(fv_wq, &ctx->async);
	else
		fv_tell_event(ctx, index);
}

/* Whoever waits for a completion looks, and finds the device dead. */
static void fv_dead(void *data)
{
	struct fv_context *ctx = data;

	WRITE_ONCE(ctx->dead, true);
	wake_up_all(&ctx->wait);
	fv_tell_soon(ctx);
	if (fv_is_kernel(ctx))
		queue_work(fv_wq, &ctx->dev->death);
}

/*
 * The device touches no memory any more: what the kernel has posted is over. A queue pair without a
 * receive queue of its own says so by an event, also where the backend has said it before.
 */
void fv_context_over(struct fv_context *ctx)
{
	struct ib_event event = {
		.device = &ctx->dev->ib,
		.event = IB_EVENT_QP_LAST_WQE_REACHED,
	};
	unsigned long handle;
	struct fv_qp *qp;

	smp_store_release(&ctx->is_over, true);
	/* Pairs with that of fv_posted(). */
	smp_mb();
	fv_tell_soon(ctx);
	mutex_lock(&ctx->objects_lock);
	xa_for_each(&ctx->qps, handle, qp) {
		if (qp->ib.srq && qp->ib.event_handler) {
			event.element.qp = &qp->ib;
			qp->ib.event_handler(&event, qp->ib.qp_context);
		}
	}
	mutex_unlock(&ctx->objects_lock);
}

static const struct farlane_client fv_client = {
	.event = fv_event,
	.dead = fv_dead,
};

/*
 * Of a completion queue that has overrun nothing more comes, and the kernel waits for what it has
 * posted without a limit: a device that is dead ends that.
 */
static void fv_cq_event(struct fv_context *ctx, u32 handle, struct ib_event *event)
{
	struct fv_cq *cq = xa_load(&ctx->cqs, handle);

	if (!cq)
		return;
	event->element.cq = &cq->ib;
	if (cq->ib.event_handler)
		cq->ib.event_handler(event, cq->ib.cq_context);
	if (fv_is_kernel(ctx))
		farlane_client_condemn(ctx->dev->fl, "a completion queue of the kernel has overrun");
}

static void fv_qp_event(struct fv_context *ctx, u32 handle, struct ib_event *event)
{
	struct fv_qp *qp = xa_load(&ctx->qps, handle);

	if (!qp)
		return;
	if (event->event == IB_EVENT_QP_FATAL || event->event == IB_EVENT_QP_REQ_ERR ||
	    event->event == IB_EVENT_QP_ACCESS_ERR)
		fv_qp_breaks(qp);
	if (!qp->ib.event_handler)
		return;
	event->element.qp = &qp->ib;
	qp->ib.event_handler(event, qp->ib.qp_context);
}

static void fv_srq_event(struct fv_context *ctx, u32 handle, struct ib_event *event)
{
	struct fv_srq *srq = xa_load(&ctx->srqs, handle);

	if (!srq || !srq->ib.event_handler)
		return;
	event->element.srq = &srq->ib;
	srq->ib.event_handler(event, srq->ib.srq_context);
}

/* Under objects_lock. The numbers are those of enum ib_event_type. */
static void fv_async_event(struct fv_context *ctx, const struct farlane_async_event *entry)
{
	struct ib_event event = {
		.device = &ctx->dev->ib,
		.event = le32_to_cpu(entry->kind),
	};
	u32 handle = le32_to_cpu(entry->object);

	switch (event.event) {
	case IB_EVENT_CQ_ERR:
		fv_cq_event(ctx, handle, &event);
		break;
	case IB_EVENT_QP_FATAL:
	case IB_EVENT_QP_REQ_ERR:
	case IB_EVENT_QP_ACCESS_ERR:
	case IB_EVENT_COMM_EST:
	case IB_EVENT_SQ_DRAINED:
	case IB_EVENT_QP_LAST_WQE_REACHED:
		fv_qp_event(ctx, handle, &event);
		break;
	case IB_EVENT_SRQ_ERR:
	case IB_EVENT_SRQ_LIMIT_REACHED:
		fv_srq_event(ctx, handle, &event);
		break;
	default:
		ibdev_warn_ratelimited(&ctx->dev->ib, "event of kind %u\n",
				       le32_to_cpu(entry->kind));
	}
}

/* Takes what is in the asynchronous ring; the backend may wait for room in it. */
static void fv_async(struct work_struct *work)
{
	struct fv_context *ctx = container_of(work, struct fv_context, async);
	struct farlane_async_event entry;
	u32 left, slot;

	/* A context that is being opened has no objects. */
	if (!READ_ONCE(ctx->base))
		return;
	mutex_lock(&ctx->objects_lock);
	do {
		left = fv_load(ctx, FARLANE_OFF_ASYNC_PRODUCED) - ctx->async_consumed;
		if (left > FARLANE_ASYNC_ENTRIES) {
			ibdev_err_ratelimited(&ctx->dev->ib, "the ring of events is out of order\n");
			break;
		}
		for (; left; left--) {
			slot = ctx->async_consumed % FARLANE_ASYNC_ENTRIES;
			memcpy(&entry, ctx->base + FARLANE_OFF_ASYNC_RING + slot * sizeof(entry),
			       sizeof(entry));
			fv_store(ctx, FARLANE_OFF_ASYNC_CONSUMED, ++ctx->async_consumed);
			fv_async_event(ctx, &entry);
		}
		fv_wake_backend(ctx);
	} while (fv_load(ctx, FARLANE_OFF_ASYNC_PRODUCED) != ctx->async_consumed);
	mutex_unlock(&ctx->objects_lock);
}

static int fv_negotiate(struct fv_context *ctx)
{
	struct farlane_version_range range = {
		.min = cpu_to_le32(FV_VERBS_VERSION),
		.max = cpu_to_le32(FV_VERBS_VERSION),
	};
	__le32 version;

	return fv_call(ctx, FARLANE_CALL_NEGOTIATE, &range, sizeof(range), &version,
		       sizeof(version));
}

/* The header, where this module sees it as one piece, until the last event of it is handled. */
static int fv_context_header(struct fv_context *ctx)
{
	struct farlane_shared header;
	unsigned int i;
	int err;

	err = farlane_client_segment(ctx->core, FARLANE_HEADER_SEGMENT_BYTES, &header);
	if (err)
		return err;
	for (i = 0; i < ARRAY_SIZE(ctx->header); i++) {
		ctx->header[i] = header.pages[i];
		get_page(ctx->header[i]);
	}
	WRITE_ONCE(ctx->base, vmap(ctx->header, ARRAY_SIZE(ctx->header), VM_MAP, PAGE_KERNEL));
	return ctx->base ? 0 : -ENOMEM;
}

/* No event comes any more. */
static void fv_events_exit(struct fv_context *ctx)
{
	cancel_work_sync(&ctx->async);
	if (fv_is_kernel(ctx))
		cancel_work_sync(&ctx->dev->death);
	fv_tell_exit(ctx);
}

/**
 * fv_context_open - open a context
 * @ctx: zeroed
 * @dev: device
 * @is_process: it is of the calling process, not the kernel's own
 *
 * Return: 0 or an error number, and then there is nothing to close.
 */
int fv_context_open(struct fv_context *ctx, struct fv_device *dev, bool is_process)
{
	int err;

	ctx->dev = dev;
	mutex_init(&ctx->turn);
	init_waitqueue_head(&ctx->wait);
	INIT_WORK(&ctx->async, fv_async);
	mutex_init(&ctx->objects_lock);
	xa_init(&ctx->qps);
	xa_init(&ctx->srqs);
	xa_init(&ctx->cqs);
	mutex_init(&ctx->resize_lock);
	mutex_init(&ctx->controls_lock);
	INIT_LIST_HEAD(&ctx->controls);
	err = fv_tell_init(ctx);
	if (err)
		return err;
	ctx->core = farlane_client_open(dev->fl, is_process, &fv_client, ctx);
	if (IS_ERR(ctx->core)) {
		/* An event of who had the same id before. */
		fv_events_exit(ctx);
		return PTR_ERR(ctx->core);
	}
	err = fv_context_header(ctx);
	if (!err)
		err = fv_negotiate(ctx);
	if (err)
		fv_context_close(ctx);
	return err;
}

void fv_context_close(struct fv_context *ctx)
{
	unsigned int i;

	farlane_client_close(ctx->core);
	fv_events_exit(ctx);
	fv_controls_release(ctx);
	vunmap(ctx->base);
	for (i = 0; i < ARRAY_SIZE(ctx->header) && ctx->header[i]; i++)
		put_page(ctx->header[i]);
	xa_destroy(&ctx->qps);
	xa_destroy(&ctx->srqs);
	xa_destroy(&ctx->cqs);
}
