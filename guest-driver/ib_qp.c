// SPDX-License-Identifier: GPL-2.0
/* Queue pairs. */
#include <linux/slab.h>

#include "ib.h"

/*
 * Rights that no memory of the device has, or that say nothing of what a peer may do: they are for
 * registrations. A queue pair may be given them.
 */
#define FV_IDLE_ACCESS (IB_ACCESS_OPTIONAL | IB_ACCESS_MW_BIND | IB_ZERO_BASED | \
			IB_ACCESS_ON_DEMAND | IB_ACCESS_HUGETLB | FV_ACCESS_FLUSH_PERSISTENT)

static int fv_check_init(const struct ib_qp *ibqp, const struct ib_qp_init_attr *init)
{
	const struct fv_device *dev = to_fv(ibqp->device);
	const struct ib_device_attr *limits = &ibqp->device->attrs;
	const struct ib_qp_cap *cap = &init->cap;

	switch (init->qp_type) {
	case IB_QPT_RC:
	case IB_QPT_UC:
	case IB_QPT_UD:
		break;
	case IB_QPT_GSI:
		/* The backend has it for the kernel alone. */
		if (!init->srq)
			break;
		fallthrough;
	default:
		return -EOPNOTSUPP;
	}
	if (init->create_flags || init->rwq_ind_tbl)
		return -EOPNOTSUPP;
	if (!init->send_cq || !init->recv_cq || cap->max_send_wr > limits->max_qp_wr ||
	    cap->max_send_sge > limits->max_send_sge ||
	    cap->max_inline_data > le32_to_cpu(dev->attr.max_inline_data))
		return -EINVAL;
	if (!init->srq && (cap->max_recv_wr > limits->max_qp_wr ||
			   cap->max_recv_sge > limits->max_recv_sge))
		return -EINVAL;
	return 0;
}

/* A work queue; one of the kernel's remembers what was posted. */
static struct fv_queue *fv_work_queue(struct fv_qp *qp, struct ib_udata *udata, u32 requests,
				      u32 bytes, struct mminfo *mi)
{
	struct fv_queue *queue = fv_queue_new(qp->ctx, udata, requests, bytes, mi);

	if (IS_ERR(queue) || udata)
		return queue;
	queue->requests = kvcalloc(queue->slots, sizeof(*queue->requests), GFP_KERNEL);
	if (!queue->requests) {
		fv_queue_del(queue);
		return ERR_PTR(-ENOMEM);
	}
	return queue;
}

/* Allocates the queues, and says in the capabilities how large they have become. */
static int fv_qp_queues(struct fv_qp *qp, struct ib_qp_init_attr *init, struct ib_udata *udata,
			struct rxe_create_qp_resp *resp)
{
	struct ib_qp_cap *cap = &init->cap;
	u32 bytes, payload;

	cap->max_send_sge = max(cap->max_send_sge, 1U);
	payload = max_t(u32, cap->max_send_sge * sizeof(struct rxe_sge), cap->max_inline_data);
	cap->max_inline_data = min(payload, le32_to_cpu(to_fv(qp->ib.device)->attr.max_inline_data));
	bytes = sizeof(struct rxe_send_wqe) + payload;
	qp->send = fv_work_queue(qp, udata, cap->max_send_wr, bytes, &resp->sq_mi);
	if (IS_ERR(qp->send))
		return PTR_ERR(qp->send);
	cap->max_send_wr = qp->send->slots - 1;
	if (init->srq) {
		cap->max_recv_wr = 0;
		cap->max_recv_sge = 0;
		return 0;
	}
	cap->max_recv_sge = max(cap->max_recv_sge, 1U);
	bytes = sizeof(struct rxe_recv_wqe) + cap->max_recv_sge * sizeof(struct rxe_sge);
	qp->recv = fv_work_queue(qp, udata, cap->max_recv_wr, bytes, &resp->rq_mi);
	if (IS_ERR(qp->recv)) {
		fv_queue_del(qp->send);
		return PTR_ERR(qp->recv);
	}
	cap->max_recv_wr = qp->recv->slots - 1;
	return 0;
}

static int fv_qp_make(struct fv_qp *qp, const struct ib_qp_init_attr *init)
{
	struct farlane_create_qp_rings arg = {
		.pd = cpu_to_le32(to_fv_pd(qp->ib.pd)->handle),
		.send_cq = cpu_to_le32(qp->send_cq->handle),
		.recv_cq = cpu_to_le32(qp->recv_cq->handle),
		.qp_type = cpu_to_le32(init->qp_type),
		.send_sge = cpu_to_le32(init->cap.max_send_sge),
		.inline_bytes = cpu_to_le32(init->cap.max_inline_data),
		.recv_sge = cpu_to_le32(init->cap.max_recv_sge),
		.signal_all = cpu_to_le32(init->sq_sig_type == IB_SIGNAL_ALL_WR),
	};
	struct farlane_qp result;
	int err;

	if (init->srq)
		arg.srq = cpu_to_le32(to_fv_srq(init->srq)->handle);
	fv_queue_ring(qp->send, &arg.send);
	fv_queue_ring(qp->recv, &arg.recv);
	fv_control_block(&qp->control, &arg.control);
	err = fv_call(qp->ctx, FARLANE_CALL_CREATE_QP_RINGS, &arg, sizeof(arg), &result,
		      sizeof(result));
	if (err)
		return err;
	qp->handle = le32_to_cpu(result.handle);
	qp->ib.qp_num = le32_to_cpu(result.qp_num);
	/* There is no bit to ring it by. */
	if (fv_handle_slot(qp->handle) >= FARLANE_MAX_QPS) {
		farlane_client_condemn(qp->ctx->dev->fl, "a queue pair has no slot");
		return -EIO;
	}
	return 0;
}

static int fv_qp_unmake(struct fv_qp *qp)
{
	return fv_destroy_call(qp->ctx, FARLANE_CALL_DESTROY_QP, qp->handle);
}

/* Completions of its number are the queue pair's. */
static int fv_cq_name(struct fv_cq *cq, struct fv_qp *qp)
{
	int err;

	/* It sends and receives here. */
	if (xa_load(&cq->qps, qp->ib.qp_num) == qp)
		return 0;
	err = xa_insert(&cq->qps, qp->ib.qp_num, qp, GFP_KERNEL);
	/* A backend that gives two the same number. */
	return err == -EBUSY ? -EPROTO : err;
}

static void fv_cq_unname(struct fv_cq *cq, struct fv_qp *qp)
{
	xa_cmpxchg(&cq->qps, qp->ib.qp_num, qp, NULL, 0);
}

/* Whoever polls has none any more when this returns. */
static void fv_qp_unlink(struct fv_qp *qp)
{
	fv_cq_unname(qp->send_cq, qp);
	fv_cq_unname(qp->recv_cq, qp);
	spin_lock_irq(&qp->send_cq->lock);
	list_del(&qp->send_link);
	spin_unlock_irq(&qp->send_cq->lock);
	spin_lock_irq(&qp->recv_cq->lock);
	list_del(&qp->recv_link);
	spin_unlock_irq(&qp->recv_cq->lock);
}

/* Of the kernel: its completions are known as such from now on. */
static int fv_qp_link(struct fv_qp *qp)
{
	int err;

	spin_lock_irq(&qp->send_cq->lock);
	list_add_tail(&qp->send_link, &qp->send_cq->senders);
	spin_unlock_irq(&qp->send_cq->lock);
	spin_lock_irq(&qp->recv_cq->lock);
	list_add_tail(&qp->recv_link, &qp->recv_cq->receivers);
	spin_unlock_irq(&qp->recv_cq->lock);
	err = fv_cq_name(qp->send_cq, qp);
	if (!err)
		err = fv_cq_name(qp->recv_cq, qp);
	if (err)
		fv_qp_unlink(qp);
	return err;
}

int fv_create_qp(struct ib_qp *ibqp, struct ib_qp_init_attr *init, struct ib_udata *udata)
{
	struct fv_qp *qp = to_fv_qp(ibqp);
	struct rxe_create_qp_resp resp = {};
	int err;

	err = fv_check_init(ibqp, init);
	if (err)
		return err;
	if (udata && udata->outlen < sizeof(resp))
		return -EINVAL;
	qp->ctx = to_fv_pd(ibqp->pd)->ctx;
	qp->send_cq = to_fv_cq(init->send_cq);
	qp->recv_cq = to_fv_cq(init->recv_cq);
	if (qp->send_cq->ctx != qp->ctx || qp->recv_cq->ctx != qp->ctx)
		return -EINVAL;
	spin_lock_init(&qp->send_lock);
	spin_lock_init(&qp->recv_lock);
	err = fv_control_new(qp->ctx, &qp->control);
	if (err)
		return err;
	err = fv_qp_queues(qp, init, udata, &resp);
	if (err)
		goto control;
	qp->cap = init->cap;
	qp->sig_type = init->sq_sig_type;
	err = fv_qp_make(qp, init);
	if (err)
		goto queues;
	if (udata)
		err = ib_copy_to_udata(udata, &resp, sizeof(resp));
	else
		err = fv_qp_link(qp);
	if (err)
		goto destroy;
	err = fv_object_add(qp->ctx, &qp->ctx->qps, qp->handle, qp);
	if (!err)
		return 0;

	if (!udata)
		fv_qp_unlink(qp);
destroy:
	fv_qp_unmake(qp);
queues:
	fv_queue_del(qp->recv);
	fv_queue_del(qp->send);
control:
	fv_control_del(qp->ctx, &qp->control);
	return err;
}

/* Of the kernel: what it has completed, and nobody has polled, is of nobody. */
static void fv_qp_forget(struct fv_qp *qp)
{
	fv_cq_forget(qp->send_cq, qp->ib.qp_num);
	if (qp->recv_cq != qp->send_cq)
		fv_cq_forget(qp->recv_cq, qp->ib.qp_num);
}

int fv_destroy_qp(struct ib_qp *ibqp, struct ib_udata *udata)
{
	struct fv_qp *qp = to_fv_qp(ibqp);
	int err;

	if (fv_is_kernel(qp->ctx))
		fv_qp_unlink(qp);
	err = fv_qp_unmake(qp);
	if (err)
		return err;
	if (fv_is_kernel(qp->ctx))
		fv_qp_forget(qp);
	fv_object_del(qp->ctx, &qp->ctx->qps, qp->handle);
	fv_control_del(qp->ctx, &qp->control);
	fv_queue_del(qp->recv);
	fv_queue_del(qp->send);
	return 0;
}

static void fv_qp_address(struct farlane_qp_attr *wire, const struct rdma_ah_attr *ah)
{
	const struct ib_global_route *grh = rdma_ah_read_grh(ah);

	wire->is_global = 1;
	wire->sgid_index = grh->sgid_index;
	wire->hop_limit = grh->hop_limit;
	wire->traffic_class = grh->traffic_class;
	wire->flow_label = cpu_to_le32(grh->flow_label);
	memcpy(wire->dgid, grh->dgid.raw, sizeof(wire->dgid));
	wire->sl = rdma_ah_get_sl(ah);
	wire->static_rate = rdma_ah_get_static_rate(ah);
	wire->ah_port = rdma_ah_get_port_num(ah);
}

/* A queue pair was brought to a state. */
static void fv_qp_changed(struct fv_qp *qp, enum ib_qp_state state)
{
	WRITE_ONCE(qp->state, state);
	if (state == IB_QPS_ERR)
		fv_qp_breaks(qp);
	if (state != IB_QPS_RESET || !fv_is_kernel(qp->ctx))
		return;
	/* What was posted is forgotten, and what is completed is of nobody. */
	fv_qp_forget(qp);
	fv_queue_discard(qp->send, qp->send_cq);
	if (qp->recv)
		fv_queue_discard(qp->recv, qp->recv_cq);
}

int fv_modify_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask, struct ib_udata *udata)
{
	struct fv_qp *qp = to_fv_qp(ibqp);
	struct farlane_modify_qp arg = {
		.qp = cpu_to_le32(qp->handle),
		.mask = cpu_to_le32(mask),
		.attr = {
			.qp_state = attr->qp_state,
			.cur_qp_state = attr->cur_qp_state,
			.path_mtu = attr->path_mtu,
			.path_mig_state = attr->path_mig_state,
			.port_num = attr->port_num,
			.max_rd_atomic = attr->max_rd_atomic,
			.max_dest_rd_atomic = attr->max_dest_rd_atomic,
			.min_rnr_timer = attr->min_rnr_timer,
			.timeout = attr->timeout,
			.retry_cnt = attr->retry_cnt,
			.rnr_retry = attr->rnr_retry,
			.en_sqd_async_notify = attr->en_sqd_async_notify,
			.pkey_index = cpu_to_le16(attr->pkey_index),
			.qkey = cpu_to_le32(attr->qkey),
			.rq_psn = cpu_to_le32(attr->rq_psn),
			.sq_psn = cpu_to_le32(attr->sq_psn),
			.dest_qp_num = cpu_to_le32(attr->dest_qp_num),
			.qp_access_flags = cpu_to_le32(attr->qp_access_flags & ~FV_IDLE_ACCESS),
		},
	};
	bool was_in_error = READ_ONCE(qp->in_error);
	int err;

	if (mask & ~IB_QP_ATTR_STANDARD_BITS || mask & (IB_QP_ALT_PATH | IB_QP_CAP))
		return -EOPNOTSUPP;
	if (mask & IB_QP_AV) {
		/* RoCE has no other. */
		if (!(rdma_ah_get_ah_flags(&attr->ah_attr) & IB_AH_GRH))
			return -EINVAL;
		fv_qp_address(&arg.attr, &attr->ah_attr);
	}
	/* It is of the port that it was made for; the verbs do not say so. */
	if (qp->ib.qp_type == IB_QPT_GSI && mask & IB_QP_STATE && attr->qp_state == IB_QPS_INIT) {
		arg.mask |= cpu_to_le32(IB_QP_PORT);
		arg.attr.port_num = 1;
	}
	/* Before the call: it may break in its new state before that is known here. */
	if (mask & IB_QP_STATE)
		WRITE_ONCE(qp->in_error, false);
	err = fv_call(qp->ctx, FARLANE_CALL_MODIFY_QP, &arg, sizeof(arg), NULL, 0);
	/*
	 * What the kernel has posted to a dead device is flushed: it may wait for that. Management
	 * datagrams go on, and fail one by one.
	 */
	if (err == -ENODEV && fv_is_kernel(qp->ctx) && mask & IB_QP_STATE &&
	    (attr->qp_state == IB_QPS_ERR || qp->ib.qp_type == IB_QPT_GSI))
		err = 0;
	if (!err && mask & IB_QP_STATE)
		fv_qp_changed(qp, attr->qp_state);
	else if (was_in_error)
		fv_qp_breaks(qp);
	return err;
}

static void fv_ah_attr(struct rdma_ah_attr *ah, const struct farlane_qp_attr *wire)
{
	union ib_gid dgid;

	memcpy(dgid.raw, wire->dgid, sizeof(dgid.raw));
	ah->type = RDMA_AH_ATTR_TYPE_ROCE;
	rdma_ah_set_port_num(ah, wire->ah_port);
	rdma_ah_set_sl(ah, wire->sl);
	rdma_ah_set_static_rate(ah, wire->static_rate);
	if (wire->is_global)
		rdma_ah_set_grh(ah, &dgid, le32_to_cpu(wire->flow_label), wire->sgid_index,
				wire->hop_limit, wire->traffic_class);
}

int fv_query_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
		struct ib_qp_init_attr *init)
{
	struct fv_qp *qp = to_fv_qp(ibqp);
	__le32 handle = cpu_to_le32(qp->handle);
	struct farlane_qp_attr wire;
	int err;

	err = fv_call(qp->ctx, FARLANE_CALL_QUERY_QP, &handle, sizeof(handle), &wire, sizeof(wire));
	if (err)
		return err;
	memset(attr, 0, sizeof(*attr));
	attr->qp_state = wire.qp_state;
	attr->cur_qp_state = wire.cur_qp_state;
	attr->path_mtu = wire.path_mtu;
	attr->path_mig_state = wire.path_mig_state;
	attr->port_num = wire.port_num;
	attr->max_rd_atomic = wire.max_rd_atomic;
	attr->max_dest_rd_atomic = wire.max_dest_rd_atomic;
	attr->min_rnr_timer = wire.min_rnr_timer;
	attr->timeout = wire.timeout;
	attr->retry_cnt = wire.retry_cnt;
	attr->rnr_retry = wire.rnr_retry;
	attr->en_sqd_async_notify = wire.en_sqd_async_notify;
	attr->sq_draining = wire.sq_draining;
	attr->pkey_index = le16_to_cpu(wire.pkey_index);
	attr->qkey = le32_to_cpu(wire.qkey);
	attr->rq_psn = le32_to_cpu(wire.rq_psn);
	attr->sq_psn = le32_to_cpu(wire.sq_psn);
	attr->dest_qp_num = le32_to_cpu(wire.dest_qp_num);
	attr->qp_access_flags = le32_to_cpu(wire.qp_access_flags);
	fv_ah_attr(&attr->ah_attr, &wire);
	attr->cap = qp->cap;

	init->event_handler = ibqp->event_handler;
	init->qp_context = ibqp->qp_context;
	init->send_cq = ibqp->send_cq;
	init->recv_cq = ibqp->recv_cq;
	init->srq = ibqp->srq;
	init->qp_type = ibqp->qp_type;
	init->sq_sig_type = qp->sig_type;
	init->cap = qp->cap;
	return 0;
}
