// SPDX-License-Identifier: GPL-2.0
/* Queue pairs, address handles, multicast groups. */
#include <linux/slab.h>

#include "ib.h"

/*
 * Rights that no memory of the device has, or that say nothing of what a peer may do: they are for
 * registrations. A queue pair may be given them.
 */
#define FV_IDLE_ACCESS (IB_ACCESS_OPTIONAL | IB_ACCESS_MW_BIND | IB_ZERO_BASED | \
			IB_ACCESS_ON_DEMAND | IB_ACCESS_HUGETLB | FV_ACCESS_FLUSH_PERSISTENT)

static struct fv_qp *to_fv_qp(struct ib_qp *ibqp)
{
	return container_of(ibqp, struct fv_qp, ib);
}

static u32 fv_slot(u32 handle)
{
	return (handle & ((1U << FARLANE_HANDLE_SLOT_BITS) - 1)) - 1;
}

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
	qp->send = fv_queue_new(qp->ctx, udata, cap->max_send_wr, bytes, &resp->sq_mi);
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
	qp->recv = fv_queue_new(qp->ctx, udata, cap->max_recv_wr, bytes, &resp->rq_mi);
	if (IS_ERR(qp->recv)) {
		fv_queue_del(qp->send);
		return PTR_ERR(qp->recv);
	}
	cap->max_recv_wr = qp->recv->slots - 1;
	return 0;
}

static int fv_qp_make(struct fv_qp *qp, const struct ib_qp_init_attr *init)
{
	const struct fv_pd *pd = container_of(qp->ib.pd, struct fv_pd, ib);
	const struct fv_cq *send_cq = container_of(init->send_cq, struct fv_cq, ib);
	const struct fv_cq *recv_cq = container_of(init->recv_cq, struct fv_cq, ib);
	struct farlane_create_qp_rings arg = {
		.pd = cpu_to_le32(pd->handle),
		.send_cq = cpu_to_le32(send_cq->handle),
		.recv_cq = cpu_to_le32(recv_cq->handle),
		.qp_type = cpu_to_le32(init->qp_type),
		.send_sge = cpu_to_le32(init->cap.max_send_sge),
		.inline_bytes = cpu_to_le32(init->cap.max_inline_data),
		.recv_sge = cpu_to_le32(init->cap.max_recv_sge),
		.signal_all = cpu_to_le32(init->sq_sig_type == IB_SIGNAL_ALL_WR),
	};
	struct farlane_qp result;
	int err;

	if (init->srq)
		arg.srq = cpu_to_le32(container_of(init->srq, struct fv_srq, ib)->handle);
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
	if (fv_slot(qp->handle) >= FARLANE_MAX_QPS) {
		farlane_client_condemn(qp->ctx->dev->fl, "a queue pair has no slot");
		return -EIO;
	}
	return 0;
}

static void fv_qp_unmake(struct fv_qp *qp)
{
	if (fv_destroy_call(qp->ctx, FARLANE_CALL_DESTROY_QP, qp->handle))
		fv_control_del(qp->ctx, &qp->control);
	/* Else the backend keeps it. */
	qp->control.page = NULL;
}

int fv_create_qp(struct ib_qp *ibqp, struct ib_qp_init_attr *init, struct ib_udata *udata)
{
	struct fv_qp *qp = to_fv_qp(ibqp);
	struct rxe_create_qp_resp resp = {};
	int err;

	if (!udata)
		return -EOPNOTSUPP;
	err = fv_check_init(ibqp, init);
	if (err)
		return err;
	if (udata->outlen < sizeof(resp))
		return -EINVAL;
	qp->ctx = container_of(ibqp->pd, struct fv_pd, ib)->ctx;
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
	err = ib_copy_to_udata(udata, &resp, sizeof(resp));
	if (err)
		goto destroy;
	err = fv_object_add(qp->ctx, &qp->ctx->qps, qp->handle, qp);
	if (!err)
		return 0;

destroy:
	fv_qp_unmake(qp);
queues:
	fv_queue_del(qp->recv);
	fv_queue_del(qp->send);
control:
	fv_control_del(qp->ctx, &qp->control);
	return err;
}

int fv_destroy_qp(struct ib_qp *ibqp, struct ib_udata *udata)
{
	struct fv_qp *qp = to_fv_qp(ibqp);

	fv_object_del(qp->ctx, &qp->ctx->qps, qp->handle);
	fv_qp_unmake(qp);
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
	int err;

	if (mask & ~IB_QP_ATTR_STANDARD_BITS || mask & (IB_QP_ALT_PATH | IB_QP_CAP))
		return -EOPNOTSUPP;
	if (mask & IB_QP_AV) {
		/* RoCE has no other. */
		if (!(rdma_ah_get_ah_flags(&attr->ah_attr) & IB_AH_GRH))
			return -EINVAL;
		fv_qp_address(&arg.attr, &attr->ah_attr);
	}
	err = fv_call(qp->ctx, FARLANE_CALL_MODIFY_QP, &arg, sizeof(arg), NULL, 0);
	if (!err && mask & IB_QP_STATE)
		WRITE_ONCE(qp->state, attr->qp_state);
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

/* The doorbell of a process: it has published requests in its queue. */
int fv_post_send(struct ib_qp *ibqp, const struct ib_send_wr *wr, const struct ib_send_wr **bad)
{
	struct fv_qp *qp = to_fv_qp(ibqp);

	if (!ibqp->uobject || wr) {
		*bad = wr;
		return -EOPNOTSUPP;
	}
	if (READ_ONCE(qp->ctx->dead))
		return -EIO;
	/* As with rxe: what was published waits. */
	if (READ_ONCE(qp->state) < IB_QPS_RTS)
		return -EINVAL;
	fv_ring_queue(qp->ctx, &qp->control, fv_slot(qp->handle));
	return 0;
}

int fv_create_ah(struct ib_ah *ibah, struct rdma_ah_init_attr *init, struct ib_udata *udata)
{
	const struct ib_global_route *grh = rdma_ah_read_grh(init->ah_attr);
	const struct fv_pd *pd = container_of(ibah->pd, struct fv_pd, ib);
	struct fv_ah *ah = container_of(ibah, struct fv_ah, ib);
	struct farlane_create_ah arg = {
		.pd = cpu_to_le32(pd->handle),
		.flow_label = cpu_to_le32(grh->flow_label),
		.is_global = 1,
		.sgid_index = grh->sgid_index,
		.hop_limit = grh->hop_limit,
		.traffic_class = grh->traffic_class,
		.sl = rdma_ah_get_sl(init->ah_attr),
		.static_rate = rdma_ah_get_static_rate(init->ah_attr),
		.port_num = rdma_ah_get_port_num(init->ah_attr),
	};
	struct rxe_create_ah_resp resp = {};
	__le32 handle;
	int err;

	/* Requests name it by a number that the provider is told. */
	if (udata && udata->outlen < sizeof(resp))
		return -EINVAL;
	if (!(rdma_ah_get_ah_flags(init->ah_attr) & IB_AH_GRH))
		return -EINVAL;
	if (!(init->flags & RDMA_CREATE_AH_SLEEPABLE))
		return -EOPNOTSUPP;
	memcpy(arg.dgid, grh->dgid.raw, sizeof(arg.dgid));
	err = fv_call(pd->ctx, FARLANE_CALL_CREATE_AH, &arg, sizeof(arg), &handle, sizeof(handle));
	if (err)
		return err;
	ah->handle = le32_to_cpu(handle);
	resp.ah_num = ah->handle;
	if (udata)
		err = ib_copy_to_udata(udata, &resp, sizeof(resp));
	if (err)
		fv_destroy_call(pd->ctx, FARLANE_CALL_DESTROY_AH, ah->handle);
	return err;
}

int fv_destroy_ah(struct ib_ah *ibah, u32 flags)
{
	const struct fv_pd *pd = container_of(ibah->pd, struct fv_pd, ib);
	struct fv_ah *ah = container_of(ibah, struct fv_ah, ib);

	fv_destroy_call(pd->ctx, FARLANE_CALL_DESTROY_AH, ah->handle);
	return 0;
}

static int fv_mcast(struct ib_qp *ibqp, const union ib_gid *gid, u32 number)
{
	struct fv_qp *qp = to_fv_qp(ibqp);
	struct farlane_mcast_group arg = { .qp = cpu_to_le32(qp->handle) };

	memcpy(arg.gid, gid->raw, sizeof(arg.gid));
	return fv_call(qp->ctx, number, &arg, sizeof(arg), NULL, 0);
}

int fv_attach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	return fv_mcast(ibqp, gid, FARLANE_CALL_ATTACH_MCAST);
}

int fv_detach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	return fv_mcast(ibqp, gid, FARLANE_CALL_DETACH_MCAST);
}
