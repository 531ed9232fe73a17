// SPDX-License-Identifier: GPL-2.0
/* Completion queues. */
#include <linux/slab.h>

#include "ib.h"

static int fv_cq_make(struct fv_cq *cq, u32 comp_vector)
{
	struct farlane_create_cq_ring arg = {
		.event = cpu_to_le32(cq->event),
		.comp_vector = cpu_to_le32(comp_vector),
	};
	__le32 handle;
	int err;

	fv_queue_ring(cq->queue, &arg.ring);
	fv_control_block(&cq->control, &arg.control);
	err = fv_call(cq->ctx, FARLANE_CALL_CREATE_CQ_RING, &arg, sizeof(arg), &handle,
		      sizeof(handle));
	if (err)
		return err;
	cq->handle = le32_to_cpu(handle);
	return 0;
}

static int fv_cq_unmake(struct fv_cq *cq)
{
	return fv_destroy_call(cq->ctx, FARLANE_CALL_DESTROY_CQ, cq->handle);
}

/* Entries that can be asked for: the ring and a free element fit into a segment. */
static bool fv_cq_fits(struct fv_device *dev, unsigned int entries)
{
	return entries && entries <= dev->ib.attrs.max_cqe;
}

int fv_create_cq(struct ib_cq *ibcq, const struct ib_cq_init_attr *attr,
		 FV_CQ_ARGUMENT *argument)
{
	struct ib_udata *udata = FV_CQ_UDATA(argument);
	struct fv_device *dev = to_fv(ibcq->device);
	struct fv_cq *cq = to_fv_cq(ibcq);
	struct rxe_create_cq_resp resp = {};
	int err;

	if (attr->flags)
		return -EOPNOTSUPP;
	if ((udata && udata->outlen < sizeof(resp)) || !fv_cq_fits(dev, attr->cqe))
		return -EINVAL;
	cq->ctx = fv_context_of(ibcq->device, udata);
	spin_lock_init(&cq->lock);
	INIT_LIST_HEAD(&cq->senders);
	INIT_LIST_HEAD(&cq->receivers);
	xa_init(&cq->qps);
	err = fv_control_new(cq->ctx, &cq->control);
	if (err)
		return err;
	cq->queue = fv_queue_new(cq->ctx, udata, attr->cqe, sizeof(struct ib_uverbs_wc), &resp.mi);
	if (IS_ERR(cq->queue)) {
		err = PTR_ERR(cq->queue);
		goto control;
	}
	ibcq->cqe = cq->queue->slots - 1;
	cq->event = fv_cq_event_index(cq->ctx);
	err = fv_cq_make(cq, attr->comp_vector);
	if (err)
		goto queue;
	if (udata)
		err = ib_copy_to_udata(udata, &resp, sizeof(resp));
	if (err)
		goto destroy;
	err = fv_object_add(cq->ctx, &cq->ctx->cqs, cq->handle, cq);
	if (err)
		goto destroy;
	fv_cq_add(cq);
	return 0;

destroy:
	fv_cq_unmake(cq);
queue:
	fv_queue_del(cq->queue);
control:
	fv_control_del(cq->ctx, &cq->control);
	return err;
}

/* Under resize_lock. */
static int fv_cq_resize(struct fv_cq *cq, unsigned int cqe, struct ib_udata *udata)
{
	struct farlane_move_ring arg = { .queue = cpu_to_le32(cq->handle) };
	struct rxe_resize_cq_resp resp = {};
	struct fv_queue *queue;
	int err;

	if (!udata || udata->outlen < sizeof(resp) || !fv_cq_fits(cq->ctx->dev, cqe))
		return -EINVAL;
	queue = fv_queue_new(cq->ctx, udata, cqe, sizeof(struct ib_uverbs_wc), &resp.mi);
	if (IS_ERR(queue))
		return PTR_ERR(queue);
	/* Before there is no way back. */
	err = ib_copy_to_udata(udata, &resp, sizeof(resp));
	if (!err) {
		fv_queue_ring(queue, &arg.ring);
		err = fv_call(cq->ctx, FARLANE_CALL_RESIZE_CQ_RING, &arg, sizeof(arg), NULL, 0);
	}
	if (err) {
		fv_queue_del(queue);
		return err;
	}
	swap(cq->queue, queue);
	fv_queue_del(queue);
	cq->ib.cqe = cq->queue->slots - 1;
	return 0;
}

/* The process takes no completions meanwhile: its library holds its lock. */
int fv_resize_cq(struct ib_cq *ibcq, FV_CQE cqe, struct ib_udata *udata)
{
	struct fv_cq *cq = to_fv_cq(ibcq);
	int err;

	mutex_lock(&cq->ctx->resize_lock);
	err = fv_cq_resize(cq, cqe, udata);
	mutex_unlock(&cq->ctx->resize_lock);
	return err;
}

/* What ib_free_cq() has stopped may have been told of a completion since then. */
static void fv_cq_stop_work(struct fv_cq *cq)
{
	if (!fv_is_kernel(cq->ctx))
		return;
	if (cq->ib.poll_ctx == IB_POLL_WORKQUEUE || cq->ib.poll_ctx == IB_POLL_UNBOUND_WORKQUEUE)
		cancel_work_sync(&cq->ib.work);
}

int fv_destroy_cq(struct ib_cq *ibcq, struct ib_udata *udata)
{
	struct fv_cq *cq = to_fv_cq(ibcq);
	int err = fv_cq_unmake(cq);

	if (err)
		return err;
	fv_object_del(cq->ctx, &cq->ctx->cqs, cq->handle);
	fv_cq_del(cq);
	fv_cq_stop_work(cq);
	fv_control_del(cq->ctx, &cq->control);
	fv_queue_del(cq->queue);
	return 0;
}
