// SPDX-License-Identifier: GPL-2.0
/* Shared receive queues. */
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "ib.h"

static u32 fv_recv_bytes(u32 sge)
{
	return sizeof(struct rxe_recv_wqe) + sge * sizeof(struct rxe_sge);
}

static int fv_srq_make(struct fv_srq *srq, struct fv_pd *pd)
{
	struct farlane_create_srq_ring arg = {
		.pd = cpu_to_le32(pd->handle),
		.elements = cpu_to_le32(srq->max_sge),
	};
	struct farlane_srq result;
	int err;

	fv_queue_ring(srq->queue, &arg.ring);
	fv_control_block(&srq->control, &arg.control);
	err = fv_call(srq->ctx, FARLANE_CALL_CREATE_SRQ_RING, &arg, sizeof(arg), &result,
		      sizeof(result));
	if (err)
		return err;
	srq->handle = le32_to_cpu(result.handle);
	return 0;
}

static int fv_srq_unmake(struct fv_srq *srq)
{
	return fv_destroy_call(srq->ctx, FARLANE_CALL_DESTROY_SRQ, srq->handle);
}

static int fv_srq_set_limit(struct fv_srq *srq, u32 limit)
{
	struct farlane_modify_srq arg = {
		.srq = cpu_to_le32(srq->handle),
		.mask = cpu_to_le32(IB_SRQ_LIMIT),
		.limit = cpu_to_le32(limit),
	};

	return fv_call(srq->ctx, FARLANE_CALL_MODIFY_SRQ, &arg, sizeof(arg), NULL, 0);
}

/* It may have fewer requests than the limit at once: the event waits for the lock. */
static int fv_srq_add(struct fv_srq *srq, u32 limit)
{
	struct fv_context *ctx = srq->ctx;
	int err;

	mutex_lock(&ctx->objects_lock);
	err = limit ? fv_srq_set_limit(srq, limit) : 0;
	if (!err)
		err = fv_object_add_locked(&ctx->srqs, srq->handle, srq);
	mutex_unlock(&ctx->objects_lock);
	return err;
}

int fv_create_srq(struct ib_srq *ibsrq, struct ib_srq_init_attr *init, struct ib_udata *udata)
{
	struct ib_device_attr *limits = &ibsrq->device->attrs;
	struct fv_pd *pd = container_of(ibsrq->pd, struct fv_pd, ib);
	struct fv_srq *srq = to_fv_srq(ibsrq);
	struct rxe_create_srq_resp resp = {};
	int err;

	if (init->srq_type != IB_SRQT_BASIC)
		return -EOPNOTSUPP;
	if ((udata && udata->outlen < sizeof(resp)) || !init->attr.max_wr ||
	    init->attr.max_wr > limits->max_srq_wr || init->attr.max_sge > limits->max_srq_sge)
		return -EINVAL;
	srq->ctx = pd->ctx;
	srq->max_sge = max(init->attr.max_sge, 1U);
	spin_lock_init(&srq->lock);
	err = fv_control_new(srq->ctx, &srq->control);
	if (err)
		return err;
	srq->queue = fv_queue_new(srq->ctx, udata, init->attr.max_wr, fv_recv_bytes(srq->max_sge),
				  &resp.mi);
	if (IS_ERR(srq->queue)) {
		err = PTR_ERR(srq->queue);
		goto control;
	}
	err = fv_srq_make(srq, pd);
	if (err)
		goto queue;
	if (udata)
		err = ib_copy_to_udata(udata, &resp, sizeof(resp));
	if (err)
		goto destroy;
	err = fv_srq_add(srq, init->attr.srq_limit);
	if (err)
		goto destroy;
	init->attr.max_wr = srq->queue->slots - 1;
	init->attr.max_sge = srq->max_sge;
	return 0;

destroy:
	fv_srq_unmake(srq);
queue:
	fv_queue_del(srq->queue);
control:
	fv_control_del(srq->ctx, &srq->control);
	return err;
}

/* Under resize_lock. The process posts no requests meanwhile: its library holds its lock. */
static int fv_srq_resize(struct fv_srq *srq, u32 requests, struct ib_udata *udata)
{
	struct farlane_move_ring arg = { .queue = cpu_to_le32(srq->handle) };
	struct rxe_modify_srq_cmd cmd;
	struct fv_queue *queue;
	struct mminfo mi = {};
	int err;

	if (!udata || udata->inlen < sizeof(cmd) || !requests ||
	    requests > srq->ib.device->attrs.max_srq_wr)
		return -EINVAL;
	err = ib_copy_from_udata(&cmd, udata, sizeof(cmd));
	if (err)
		return err;
	queue = fv_queue_new(srq->ctx, udata, requests, fv_recv_bytes(srq->max_sge), &mi);
	if (IS_ERR(queue))
		return PTR_ERR(queue);
	/* Before there is no way back. */
	if (copy_to_user(u64_to_user_ptr(cmd.mmap_info_addr), &mi, sizeof(mi))) {
		err = -EFAULT;
	} else {
		fv_queue_ring(queue, &arg.ring);
		err = fv_call(srq->ctx, FARLANE_CALL_RESIZE_SRQ_RING, &arg, sizeof(arg), NULL, 0);
	}
	if (!err)
		swap(srq->queue, queue);
	fv_queue_del(queue);
	return err;
}

int fv_modify_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr, enum ib_srq_attr_mask mask,
		  struct ib_udata *udata)
{
	struct fv_srq *srq = to_fv_srq(ibsrq);
	int err = 0;

	if (mask & ~(IB_SRQ_MAX_WR | IB_SRQ_LIMIT))
		return -EINVAL;
	if (mask & IB_SRQ_MAX_WR) {
		mutex_lock(&srq->ctx->resize_lock);
		err = fv_srq_resize(srq, attr->max_wr, udata);
		mutex_unlock(&srq->ctx->resize_lock);
	}
	if (!err && mask & IB_SRQ_LIMIT)
		err = fv_srq_set_limit(srq, attr->srq_limit);
	return err;
}

int fv_query_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr)
{
	struct fv_srq *srq = to_fv_srq(ibsrq);
	__le32 handle = cpu_to_le32(srq->handle);
	struct farlane_srq_attr result;
	int err;

	err = fv_call(srq->ctx, FARLANE_CALL_QUERY_SRQ, &handle, sizeof(handle), &result,
		      sizeof(result));
	if (err)
		return err;
	mutex_lock(&srq->ctx->resize_lock);
	attr->max_wr = srq->queue->slots - 1;
	mutex_unlock(&srq->ctx->resize_lock);
	attr->max_sge = srq->max_sge;
	attr->srq_limit = le32_to_cpu(result.limit);
	return 0;
}

int fv_destroy_srq(struct ib_srq *ibsrq, struct ib_udata *udata)
{
	struct fv_srq *srq = to_fv_srq(ibsrq);
	int err = fv_srq_unmake(srq);

	if (err)
		return err;
	fv_object_del(srq->ctx, &srq->ctx->srqs, srq->handle);
	fv_control_del(srq->ctx, &srq->control);
	fv_queue_del(srq->queue);
	return 0;
}
