// SPDX-License-Identifier: GPL-2.0
/* Requests of the kernel, in the rings that the backend takes them from. In any context. */
#include "ib.h"

/* What the backend knows of enum ib_send_flags. */
#define FV_SEND_FLAGS (IB_SEND_FENCE | IB_SEND_SIGNALED | IB_SEND_SOLICITED | IB_SEND_INLINE)

/* Under the queue's lock: whether it has no room. */
static bool fv_is_full(const struct fv_queue *queue)
{
	/* Pairs with the release of whoever has taken the completion. */
	return queue->head - smp_load_acquire(&queue->tail) >= queue->slots - 1;
}

/* Under the queue's lock: what the entry at its head is of, for those who end it. */
static void fv_remember(struct fv_queue *queue, u64 wr_id, enum ib_wc_opcode opcode)
{
	struct fv_request *request = &queue->requests[queue->head & (queue->slots - 1)];

	request->wr_id = wr_id;
	request->opcode = opcode;
}

/* Under the queue's lock: the entry at its head is complete. */
static void fv_publish(struct fv_queue *queue)
{
	struct rxe_queue_buf *words = queue->base;

	/* For those who end it, then for the backend. */
	smp_store_release(&queue->head, queue->head + 1);
	smp_store_release(&words->producer_index, queue->head & (queue->slots - 1));
}

static void fv_put_elements(struct rxe_dma_info *dma, const struct ib_sge *from, int count)
{
	int i;

	for (i = 0; i < count; i++) {
		dma->sge[i] = (struct rxe_sge) {
			.addr = from[i].addr,
			.length = from[i].length,
			.lkey = from[i].lkey,
		};
	}
	dma->num_sge = count;
}

/* Inline data lies at addresses of the kernel, wherever that has it. */
static int fv_put_inline(struct rxe_dma_info *dma, const struct ib_send_wr *wr, u32 most)
{
	const struct ib_sge *sge = wr->sg_list;
	u32 length = 0;
	int i;

	for (i = 0; i < wr->num_sge; i++) {
		if (sge[i].length > most - length)
			return -EINVAL;
		memcpy(dma->inline_data + length, (void *)(uintptr_t)sge[i].addr, sge[i].length);
		length += sge[i].length;
	}
	dma->length = length;
	dma->num_sge = 0;
	return 0;
}

static int fv_put_register(struct rxe_send_wqe *wqe, const struct ib_reg_wr *wr)
{
	struct farlane_rxe_register *to = (void *)&wqe->wr.wr;

	return fv_fast_registration(wr, to);
}

/* Whom a datagram is for: an address handle of the kernel has no other place. */
static int fv_put_address(struct rxe_send_wqe *wqe, const struct ib_ud_wr *wr)
{
	struct farlane_rxe_addressed *to = (void *)&wqe->wr.wr;

	if (!wr->ah)
		return -EINVAL;
	*to = container_of(wr->ah, struct fv_ah, ib)->address;
	to->remote_qpn = cpu_to_le32(wr->remote_qpn);
	to->remote_qkey = cpu_to_le32(wr->remote_qkey);
	return 0;
}

static void fv_put_remote(struct rxe_send_wqe *wqe, const struct ib_send_wr *wr)
{
	wqe->wr.wr.rdma.remote_addr = rdma_wr(wr)->remote_addr;
	wqe->wr.wr.rdma.rkey = rdma_wr(wr)->rkey;
}

static void fv_put_atomic(struct rxe_send_wqe *wqe, const struct ib_atomic_wr *wr)
{
	wqe->wr.wr.atomic.remote_addr = wr->remote_addr;
	wqe->wr.wr.atomic.compare_add = wr->compare_add;
	wqe->wr.wr.atomic.swap = wr->swap;
	wqe->wr.wr.atomic.rkey = wr->rkey;
}

/* What a request is besides its data; the opcode of its completion, or an error number. */
static int fv_put_operation(struct fv_qp *qp, struct rxe_send_wqe *wqe,
			    const struct ib_send_wr *wr)
{
	bool datagrams = qp->ib.qp_type == IB_QPT_UD || qp->ib.qp_type == IB_QPT_GSI;
	int err;

	if (datagrams && wr->opcode != IB_WR_SEND && wr->opcode != IB_WR_SEND_WITH_IMM)
		return -EINVAL;
	switch (wr->opcode) {
	case IB_WR_SEND_WITH_IMM:
		wqe->wr.ex.imm_data = wr->ex.imm_data;
		fallthrough;
	case IB_WR_SEND:
		err = datagrams ? fv_put_address(wqe, ud_wr(wr)) : 0;
		return err ?: IB_WC_SEND;
	case IB_WR_SEND_WITH_INV:
		wqe->wr.ex.invalidate_rkey = wr->ex.invalidate_rkey;
		return IB_WC_SEND;
	case IB_WR_RDMA_WRITE_WITH_IMM:
		wqe->wr.ex.imm_data = wr->ex.imm_data;
		fallthrough;
	case IB_WR_RDMA_WRITE:
		fv_put_remote(wqe, wr);
		return IB_WC_RDMA_WRITE;
	case IB_WR_RDMA_READ:
		fv_put_remote(wqe, wr);
		return IB_WC_RDMA_READ;
	case IB_WR_ATOMIC_CMP_AND_SWP:
		fv_put_atomic(wqe, atomic_wr(wr));
		return IB_WC_COMP_SWAP;
	case IB_WR_ATOMIC_FETCH_AND_ADD:
		fv_put_atomic(wqe, atomic_wr(wr));
		return IB_WC_FETCH_ADD;
	case IB_WR_LOCAL_INV:
		wqe->wr.ex.invalidate_rkey = wr->ex.invalidate_rkey;
		return IB_WC_LOCAL_INV;
	case IB_WR_REG_MR:
		err = fv_put_register(wqe, reg_wr(wr));
		return err ?: IB_WC_REG_MR;
	default:
		return -EINVAL;
	}
}

/* Under send_lock. */
static int fv_post_one(struct fv_qp *qp, const struct ib_send_wr *wr)
{
	struct fv_queue *queue = qp->send;
	struct rxe_send_wqe *wqe;
	int opcode, err = 0;

	if (fv_is_full(queue))
		return -ENOMEM;
	if (wr->send_flags & ~FV_SEND_FLAGS || wr->num_sge < 0 ||
	    wr->num_sge > qp->cap.max_send_sge)
		return -EINVAL;
	wqe = fv_queue_entry(queue, queue->head);
	memset(wqe, 0, sizeof(*wqe));
	opcode = fv_put_operation(qp, wqe, wr);
	if (opcode < 0)
		return opcode;
	if (wr->send_flags & IB_SEND_INLINE)
		err = fv_put_inline(&wqe->dma, wr, qp->cap.max_inline_data);
	else
		fv_put_elements(&wqe->dma, wr->sg_list, wr->num_sge);
	if (err)
		return err;
	wqe->wr.wr_id = queue->head;
	wqe->wr.opcode = wr->opcode;
	wqe->wr.send_flags = wr->send_flags;
	fv_remember(queue, wr->wr_id, opcode);
	fv_publish(queue);
	return 0;
}

/*
 * Something was posted: the backend is told, or who ends requests of a dead device. At what is to
 * be received it looks when a message comes; what is to be flushed it has to be told of.
 */
static void fv_posted(struct fv_qp *qp, bool is_send)
{
	/* Pairs with those of fv_context_over() and fv_qp_breaks(). */
	smp_mb();
	if (READ_ONCE(qp->ctx->is_over))
		fv_tell_soon(qp->ctx);
	else if (is_send || READ_ONCE(qp->in_error))
		fv_ring_queue(qp->ctx, &qp->control, fv_handle_slot(qp->handle));
}

/* The doorbell of a process: it has published requests in its queue. */
static int fv_ring(struct fv_qp *qp)
{
	if (READ_ONCE(qp->ctx->dead))
		return -EIO;
	/* As with rxe: what was published waits. */
	if (READ_ONCE(qp->state) < IB_QPS_RTS)
		return -EINVAL;
	fv_ring_queue(qp->ctx, &qp->control, fv_handle_slot(qp->handle));
	return 0;
}

int fv_post_send(struct ib_qp *ibqp, const struct ib_send_wr *wr, const struct ib_send_wr **bad)
{
	struct fv_qp *qp = to_fv_qp(ibqp);
	unsigned long flags;
	bool posted = false;
	int err = 0;

	*bad = wr;
	if (!fv_is_kernel(qp->ctx))
		return wr ? -EOPNOTSUPP : fv_ring(qp);
	if (READ_ONCE(qp->state) < IB_QPS_RTS)
		return -EINVAL;
	spin_lock_irqsave(&qp->send_lock, flags);
	for (; wr; wr = wr->next) {
		err = fv_post_one(qp, wr);
		if (err)
			break;
		posted = true;
	}
	spin_unlock_irqrestore(&qp->send_lock, flags);
	/* RDS looks whether it is as before where all was posted. */
	if (err)
		*bad = wr;
	if (posted)
		fv_posted(qp, true);
	return err;
}

/* Under the queue's lock, which has room. */
static int fv_post_receive(struct fv_queue *queue, const struct ib_recv_wr *wr, u32 elements,
			   u64 number)
{
	struct rxe_recv_wqe *wqe;

	if (wr->num_sge < 0 || wr->num_sge > elements)
		return -EINVAL;
	wqe = fv_queue_entry(queue, queue->head);
	memset(wqe, 0, sizeof(*wqe));
	wqe->wr_id = number;
	fv_put_elements(&wqe->dma, wr->sg_list, wr->num_sge);
	if (queue->requests)
		fv_remember(queue, wr->wr_id, IB_WC_RECV);
	fv_publish(queue);
	return 0;
}

int fv_post_recv(struct ib_qp *ibqp, const struct ib_recv_wr *wr, const struct ib_recv_wr **bad)
{
	struct fv_qp *qp = to_fv_qp(ibqp);
	struct fv_queue *queue = qp->recv;
	unsigned long flags;
	bool posted = false;
	int err = 0;

	*bad = wr;
	if (!fv_is_kernel(qp->ctx))
		return -EOPNOTSUPP;
	if (!queue || READ_ONCE(qp->state) == IB_QPS_RESET)
		return -EINVAL;
	spin_lock_irqsave(&qp->recv_lock, flags);
	for (; wr; wr = wr->next) {
		err = fv_is_full(queue) ? -ENOMEM :
		      fv_post_receive(queue, wr, qp->cap.max_recv_sge, queue->head);
		if (err)
			break;
		posted = true;
	}
	spin_unlock_irqrestore(&qp->recv_lock, flags);
	if (err)
		*bad = wr;
	if (posted)
		fv_posted(qp, false);
	return err;
}

int fv_post_srq_recv(struct ib_srq *ibsrq, const struct ib_recv_wr *wr,
		     const struct ib_recv_wr **bad)
{
	struct fv_srq *srq = to_fv_srq(ibsrq);
	struct fv_queue *queue = srq->queue;
	struct rxe_queue_buf *words;
	unsigned long flags;
	int err = 0;

	*bad = wr;
	if (!fv_is_kernel(srq->ctx))
		return -EOPNOTSUPP;
	words = queue->base;
	spin_lock_irqsave(&srq->lock, flags);
	for (; wr; wr = wr->next) {
		/* A place is free when the backend has taken what lay there. */
		if (((queue->head + 1 - smp_load_acquire(&words->consumer_index)) &
		     (queue->slots - 1)) == 0) {
			err = -ENOMEM;
			break;
		}
		err = fv_post_receive(queue, wr, srq->max_sge, wr->wr_id);
		if (err)
			break;
	}
	spin_unlock_irqrestore(&srq->lock, flags);
	if (err)
		*bad = wr;
	return err;
}
