// SPDX-License-Identifier: GPL-2.0
/*
 * Completions of the kernel's own queues. What lies in shared memory is the backend's to write at
 * any time: each completion is copied once, and says nothing that is used unchecked but one thing.
 * Which request of a shared receive queue it is of is the backend's word: those are over in any
 * order, and their places in the ring are given to others before. When the device is dead, and
 * touches no memory any more, this module ends what is left itself, but for those requests, which
 * are nobody's then, as with any device.
 */
#include "ib.h"

/* As zero-copy/abi/src/queue.rs has them: what completion raises an event. */
enum {
	FV_ARM_NONE,
	FV_ARM_NEXT,
	FV_ARM_SOLICITED,
};

/* WC_FLAG_* of zero-copy/abi/src/queue.rs, which are those of libibverbs. */
#define FV_WC_GRH BIT(0)
#define FV_WC_IMM BIT(1)
#define FV_WC_INVALIDATED BIT(3)

static struct rxe_queue_buf *fv_words(const struct fv_queue *queue)
{
	return queue->base;
}

/* Under the queue's lock: whether the backend has put something in. */
static bool fv_cq_has_entries(struct fv_cq *cq)
{
	const struct fv_queue *queue = cq->queue;
	u32 produced = smp_load_acquire(&fv_words(queue)->producer_index);

	return ((produced ^ queue->tail) & (queue->slots - 1)) != 0;
}

/* Under the queue's lock: the next completion, copied. */
static bool fv_cq_take(struct fv_cq *cq, struct ib_uverbs_wc *entry)
{
	struct fv_queue *queue = cq->queue;

	if (!fv_cq_has_entries(cq))
		return false;
	memcpy(entry, fv_queue_entry(queue, queue->tail), sizeof(*entry));
	queue->tail++;
	smp_store_release(&fv_words(queue)->consumer_index, queue->tail & (queue->slots - 1));
	return true;
}

/*
 * Under the lock of the completion queue: the request of this number, which is over, as all are
 * that were posted before it. NULL where none such is under way.
 */
static const struct fv_request *fv_request_of(struct fv_queue *queue, u64 number)
{
	u32 head = smp_load_acquire(&queue->head);

	if (number > U32_MAX || (u32)number - queue->tail >= head - queue->tail)
		return NULL;
	return &queue->requests[number & (queue->slots - 1)];
}

static enum ib_wc_status fv_status(u32 status)
{
	return status > IB_WC_GENERAL_ERR ? IB_WC_GENERAL_ERR : status;
}

static void fv_received(struct ib_wc *wc, const struct ib_uverbs_wc *entry)
{
	/* The numbers are those of the kernel. */
	wc->opcode = entry->opcode == IB_WC_RECV_RDMA_WITH_IMM ?
		     IB_WC_RECV_RDMA_WITH_IMM : IB_WC_RECV;
	wc->src_qp = entry->src_qp;
	wc->slid = entry->slid;
	wc->sl = entry->sl;
	if (entry->wc_flags & FV_WC_GRH)
		wc->wc_flags |= IB_WC_GRH;
	if (entry->wc_flags & FV_WC_IMM) {
		wc->wc_flags |= IB_WC_WITH_IMM;
		wc->ex.imm_data = entry->ex.imm_data;
	} else if (entry->wc_flags & FV_WC_INVALIDATED) {
		wc->wc_flags |= IB_WC_WITH_INVALIDATE;
		wc->ex.invalidate_rkey = entry->ex.invalidate_rkey;
	}
}

/* Under the queue's lock: what a completion is of; false where it is of nothing that is known. */
static bool fv_wc(struct fv_cq *cq, const struct ib_uverbs_wc *entry, struct ib_wc *wc)
{
	bool received = entry->opcode & IB_WC_RECV;
	const struct fv_request *request;
	struct fv_queue *queue;
	struct fv_qp *qp;

	/* Of this queue, so it does not go before its destruction has had the lock. */
	qp = xa_load(&cq->qps, entry->qp_num);
	if (!qp || cq != (received ? qp->recv_cq : qp->send_cq))
		return false;
	memset(wc, 0, sizeof(*wc));
	queue = received ? qp->recv : qp->send;
	if (queue) {
		request = fv_request_of(queue, entry->wr_id);
		if (!request)
			return false;
		wc->wr_id = request->wr_id;
		wc->opcode = request->opcode;
		/* Whoever posts may have its place. */
		smp_store_release(&queue->tail, (u32)entry->wr_id + 1);
	} else {
		/* Of a shared queue, which has given its place to another one. */
		wc->wr_id = entry->wr_id;
	}
	wc->status = fv_status(entry->status);
	wc->vendor_err = entry->vendor_err;
	wc->byte_len = entry->byte_len;
	wc->qp = &qp->ib;
	wc->port_num = 1;
	if (received)
		fv_received(wc, entry);
	if (wc->status != IB_WC_SUCCESS)
		fv_qp_breaks(qp);
	return true;
}

/*
 * Under the lock of the completion queue: ends requests of a dead device. The connection manager
 * takes datagrams that are flushed for ones that it has taken back, and would wait for an answer.
 */
static int fv_flush_queue(struct fv_qp *qp, struct fv_queue *queue, int count, struct ib_wc *wc)
{
	bool fails = qp->ib.qp_type == IB_QPT_GSI && READ_ONCE(qp->state) != IB_QPS_ERR;
	const struct fv_request *request;
	int done;

	for (done = 0; done < count && queue->tail != smp_load_acquire(&queue->head); done++) {
		request = &queue->requests[queue->tail & (queue->slots - 1)];
		wc[done] = (struct ib_wc) {
			.wr_id = request->wr_id,
			.opcode = request->opcode,
			.status = fails ? IB_WC_FATAL_ERR : IB_WC_WR_FLUSH_ERR,
			.qp = &qp->ib,
			.port_num = 1,
		};
		smp_store_release(&queue->tail, queue->tail + 1);
	}
	return done;
}

static int fv_flush(struct fv_cq *cq, int count, struct ib_wc *wc)
{
	struct fv_qp *qp;
	int done = 0;

	list_for_each_entry(qp, &cq->senders, send_link)
		done += fv_flush_queue(qp, qp->send, count - done, wc + done);
	list_for_each_entry(qp, &cq->receivers, recv_link)
		if (qp->recv)
			done += fv_flush_queue(qp, qp->recv, count - done, wc + done);
	return done;
}

int fv_poll_cq(struct ib_cq *ibcq, int count, struct ib_wc *wc)
{
	struct fv_cq *cq = to_fv_cq(ibcq);
	struct ib_uverbs_wc entry;
	unsigned long flags;
	int done = 0;
	u32 looked;

	if (!fv_is_kernel(cq->ctx))
		return -EOPNOTSUPP;
	spin_lock_irqsave(&cq->lock, flags);
	/* No more than there can be, whatever the backend says. */
	for (looked = 0; done < count && looked < cq->queue->slots; looked++) {
		if (!fv_cq_take(cq, &entry))
			break;
		if (fv_wc(cq, &entry, &wc[done]))
			done++;
	}
	if (done < count && smp_load_acquire(&cq->ctx->is_over))
		done += fv_flush(cq, count - done, wc + done);
	spin_unlock_irqrestore(&cq->lock, flags);
	return done;
}

static bool fv_is_posted(const struct fv_queue *queue)
{
	return queue && READ_ONCE(queue->tail) != READ_ONCE(queue->head);
}

/* Whether somebody who polls gets something. */
static bool fv_cq_has_something(struct fv_cq *cq)
{
	unsigned long flags;
	struct fv_qp *qp;
	bool has;

	spin_lock_irqsave(&cq->lock, flags);
	has = fv_cq_has_entries(cq);
	if (smp_load_acquire(&cq->ctx->is_over)) {
		list_for_each_entry(qp, &cq->senders, send_link)
			has |= fv_is_posted(qp->send);
		list_for_each_entry(qp, &cq->receivers, recv_link)
			has |= fv_is_posted(qp->recv);
	}
	spin_unlock_irqrestore(&cq->lock, flags);
	return has;
}

static __le32 *fv_armed(struct fv_cq *cq)
{
	return cq->control.base + FARLANE_CONTROL_OFF_ARMED;
}

/* One that wants each completion is not made to want fewer. */
int fv_req_notify_cq(struct ib_cq *ibcq, enum ib_cq_notify_flags flags)
{
	struct fv_cq *cq = to_fv_cq(ibcq);

	/* A process must not wait for what does not come; the kernel's requests are ended here. */
	if (!fv_is_kernel(cq->ctx) && READ_ONCE(cq->ctx->dead))
		return -EIO;
	if ((flags & IB_CQ_SOLICITED_MASK) == IB_CQ_SOLICITED)
		cmpxchg(fv_armed(cq), cpu_to_le32(FV_ARM_NONE), cpu_to_le32(FV_ARM_SOLICITED));
	else
		xchg(fv_armed(cq), cpu_to_le32(FV_ARM_NEXT));
	/* Pairs with the backend's fence between a completion and its look at the word. */
	smp_mb();
	if (!fv_is_kernel(cq->ctx) || !(flags & IB_CQ_REPORT_MISSED_EVENTS))
		return 0;
	return fv_cq_has_something(cq);
}

/* Whether somebody waits for what this module has to say of a dead device; then no more. */
bool fv_cq_wants_end(struct fv_cq *cq)
{
	return fv_cq_has_something(cq) &&
	       xchg(fv_armed(cq), cpu_to_le32(FV_ARM_NONE)) != cpu_to_le32(FV_ARM_NONE);
}

/* What was posted to a queue is over without a word. */
void fv_queue_discard(struct fv_queue *queue, struct fv_cq *cq)
{
	unsigned long flags;

	spin_lock_irqsave(&cq->lock, flags);
	smp_store_release(&queue->tail, smp_load_acquire(&queue->head));
	spin_unlock_irqrestore(&cq->lock, flags);
}

/* A queue pair goes, and the backend adds no completions of it: those that wait name nobody. */
void fv_cq_forget(struct fv_cq *cq, u32 number)
{
	struct fv_queue *queue = cq->queue;
	struct ib_uverbs_wc *entry;
	unsigned long flags;
	u32 produced, at;

	spin_lock_irqsave(&cq->lock, flags);
	produced = smp_load_acquire(&fv_words(queue)->producer_index);
	for (at = queue->tail; (at ^ produced) & (queue->slots - 1); at++) {
		entry = fv_queue_entry(queue, at);
		if (READ_ONCE(entry->qp_num) == number)
			WRITE_ONCE(entry->qp_num, FV_NO_QP);
	}
	spin_unlock_irqrestore(&cq->lock, flags);
}
