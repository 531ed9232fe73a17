/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the files of the farlane_ib module share. Names begin with fv_: the verbs of Farlane.
 *
 * Locks, in the order in which they may be taken:
 *
 *	fv_lock				(ib_main.c: the list of devices)
 *	fv_context.resize_lock
 *	fv_context.objects_lock		(events of objects against their end)
 *	fv_context.controls_lock
 *	fv_context.turn			(the call ring)
 *	fv_context.cqs_lock		(the tasklet's, so with that off)
 *	fv_cq.lock			(interrupts off, as with the next ones)
 *	fv_qp.send_lock, fv_qp.recv_lock, fv_srq.lock
 *	locks of farlane.ko
 *	fv_device.netdev_lock
 */
#ifndef FARLANE_IB_H
#define FARLANE_IB_H

#include <linux/completion.h>
#include <linux/hashtable.h>
#include <linux/interrupt.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/netdevice.h>
#include <linux/refcount.h>
#include <linux/spinlock.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <rdma/ib_verbs.h>
#include <rdma/rdma_user_rxe.h>
#include <rdma/uverbs_ioctl.h>

#include "farlane_core.h"
#include "farlane_abi.h"
#include "farlane_verbs_abi.h"
#include "ib_compat.h"

/*
 * Version of the verbs that is asked for: the first one with queues as rxe has them. They are laid
 * out as rdma_user_rxe.h says, whose version of the ABI that is.
 */
#define FV_VERBS_VERSION 3
#define FV_USER_ABI_VERSION 2

/* No number of a queue pair: those have 24 bits. */
#define FV_NO_QP U32_MAX

struct fv_device;
struct fv_context;

/* A control block: words of a queue that its process must not write. */
struct fv_control {
	struct fv_controls *page;	/* NULL for none */
	u32 offset;
	void *base;
};

/* A request of the kernel that is under way. */
struct fv_request {
	u64 wr_id;
	enum ib_wc_opcode opcode;	/* of its completion */
};

/* A ring in memory that its process has mapped, or this module, and the backend has, too. */
struct fv_queue {
	struct rdma_user_mmap_entry entry;	/* of a process */
	struct fv_context *ctx;
	struct farlane_shared memory;
	u32 slots;
	u32 stride;
	/* Of the kernel. Numbers run on; those of the backend are taken modulo the slots. */
	void *base;			/* in one piece */
	struct fv_request *requests;	/* of a queue pair, by slot, from tail to head */
	u32 head;			/* of a work queue, by who posts, under its lock */
	u32 tail;			/* by who polls, under the lock of the completion queue */
};

struct fv_context {
	struct fv_device *dev;
	struct farlane_context *core;
	struct page *header[FARLANE_HEADER_SEGMENT_BYTES >> PAGE_SHIFT];
	void *base;			/* the same, in one piece */
	bool dead;
	bool is_over;			/* of the kernel: dead, and touches no memory any more */

	/* The call ring. */
	struct mutex turn;		/* submitted, broken */
	u32 submitted;
	bool broken;
	wait_queue_head_t wait;

	atomic_t pds;			/* protection domains; of the kernel only */

	/* The asynchronous ring. */
	struct work_struct async;	/* alone takes events */
	u32 async_consumed;
	struct mutex objects_lock;	/* what is in these is not destroyed meanwhile */
	struct xarray qps, srqs, cqs;	/* by handle */

	/* Completion queues by event index. */
	spinlock_t cqs_lock;
	DECLARE_HASHTABLE(cqs_by_event, 6);
	u32 last_event;
	struct tasklet_struct tasklet;	/* tells whoever waits */
	unsigned long *events;		/* indices that have had one */

	struct mutex resize_lock;	/* which ring a queue has */

	struct mutex controls_lock;
	struct list_head controls;
};

struct fv_ucontext {
	struct ib_ucontext ib;
	struct fv_context ctx;
};

struct fv_pd {
	struct ib_pd ib;
	struct fv_context *ctx;
	u32 handle;
};

struct fv_ah {
	struct ib_ah ib;
	u32 handle;			/* of a process */
	struct farlane_rxe_addressed address;	/* of the kernel */
};

struct fv_mr {
	struct ib_mr ib;
	struct fv_context *ctx;
	u32 handle;
	u32 region;			/* the pin, or the list of pages */
	bool has_region;
	u64 start;
	u64 length;
	u64 iova;
	int access;
	bool writable;			/* the pin */
	/* Of pages that requests name. */
	__le64 *list;
	u32 pages;
	u32 max_pages;
};

struct fv_mw {
	struct ib_mw ib;
	u32 handle;
};

struct fv_cq {
	struct ib_cq ib;
	struct fv_context *ctx;
	u32 handle;
	struct fv_queue *queue;
	struct fv_control control;
	struct hlist_node link;		/* cqs_by_event, under cqs_lock */
	u32 event;
	u32 events;			/* that it has had, under cqs_lock */
	bool was_told;			/* that the device is dead, under cqs_lock */
	struct list_head told;		/* of the tasklet alone, as is the next one */
	bool is_told;
	refcount_t refs;
	struct completion idle;
	/* Of the kernel: */
	spinlock_t lock;		/* who polls, and these */
	struct list_head senders, receivers;	/* queue pairs that complete here */
	struct xarray qps;		/* the same, by number */
};

struct fv_srq {
	struct ib_srq ib;
	struct fv_context *ctx;
	u32 handle;
	struct fv_queue *queue;
	struct fv_control control;
	u32 max_sge;
	spinlock_t lock;		/* who posts */
};

struct fv_qp {
	struct ib_qp ib;
	struct fv_context *ctx;
	u32 handle;
	struct fv_queue *send;
	struct fv_queue *recv;		/* NULL where it has a shared one */
	struct fv_control control;
	struct ib_qp_cap cap;
	enum ib_sig_type sig_type;
	enum ib_qp_state state;		/* that it was given last; the backend may have gone on */
	/* Of the kernel: */
	bool in_error;			/* flushes, as far as is known here: fv_qp_breaks() */
	spinlock_t send_lock, recv_lock;	/* who posts */
	struct fv_cq *send_cq, *recv_cq;
	struct list_head send_link, recv_link;	/* there, under their locks */
};

struct fv_device {
	struct ib_device ib;
	struct farlane *fl;
	struct device *function;	/* of the virtio device's transport */
	u32 max_events;
	u32 max_regions;
	struct list_head link;		/* fv_devices, under fv_lock */
	bool registered;		/* under fv_lock, as is the next one */
	bool is_spent;			/* it cannot be registered */
	struct fv_context kernel;	/* its own context */
	u32 all_memory;			/* a region of that */
	struct work_struct death;
	struct farlane_device_attr attr;
	struct farlane_device_limits limits;
	struct farlane_port_attr port;

	/* The network interface that it belongs to. */
	u8 mac[ETH_ALEN];		/* zero: the administrator names it */
	spinlock_t netdev_lock;
	struct net_device *netdev;
	struct notifier_block netdev_events;
	bool is_listened_to;		/* under the RTNL */
	bool up;			/* what was told last, under the RTNL */
	struct net_device *own_netdev;	/* that this module has made for it, under fv_lock */
};

/*
 * Of deaths and asynchronous events, for which a disk behind the device may wait: they go on
 * without memory. Both may wait for the watchdog of farlane.ko, which has another one.
 */
extern struct workqueue_struct *fv_wq;

static inline struct fv_device *to_fv(struct ib_device *ib)
{
	return container_of(ib, struct fv_device, ib);
}

static inline struct fv_pd *to_fv_pd(struct ib_pd *ib)
{
	return container_of(ib, struct fv_pd, ib);
}

static inline struct fv_mr *to_fv_mr(struct ib_mr *ib)
{
	return container_of(ib, struct fv_mr, ib);
}

static inline struct fv_cq *to_fv_cq(struct ib_cq *ib)
{
	return container_of(ib, struct fv_cq, ib);
}

static inline struct fv_srq *to_fv_srq(struct ib_srq *ib)
{
	return container_of(ib, struct fv_srq, ib);
}

static inline struct fv_qp *to_fv_qp(struct ib_qp *ib)
{
	return container_of(ib, struct fv_qp, ib);
}

/* Whether it is the kernel's own context, not that of a process. */
static inline bool fv_is_kernel(const struct fv_context *ctx)
{
	return ctx == &ctx->dev->kernel;
}

static inline u32 fv_handle_slot(u32 handle)
{
	return (handle & ((1U << FARLANE_HANDLE_SLOT_BITS) - 1)) - 1;
}

/* An entry of a ring of the kernel's. */
static inline void *fv_queue_entry(const struct fv_queue *queue, u32 number)
{
	return queue->base + sizeof(struct rxe_queue_buf) +
	       (size_t)(number & (queue->slots - 1)) * queue->stride;
}

/* ib_context.c: a context of the backend, its calls and events */
int fv_context_open(struct fv_context *ctx, struct fv_device *dev, bool is_process);
void fv_context_close(struct fv_context *ctx);
int fv_call(struct fv_context *ctx, u32 number, const void *args, size_t args_bytes,
	    void *result, size_t result_bytes);
int fv_handle_call(struct fv_context *ctx, u32 number, u32 handle);
int fv_destroy_call(struct fv_context *ctx, u32 number, u32 handle);
void fv_wake_backend(struct fv_context *ctx);
void fv_ring_queue(struct fv_context *ctx, struct fv_control *control, u32 slot);
void fv_qp_breaks(struct fv_qp *qp);
int fv_object_add_locked(struct xarray *objects, u32 handle, void *object);
int fv_object_add(struct fv_context *ctx, struct xarray *objects, u32 handle, void *object);
void fv_object_del(struct fv_context *ctx, struct xarray *objects, u32 handle);
void fv_context_over(struct fv_context *ctx);

/* ib_tell.c: whom a completion is told to */
int fv_tell_init(struct fv_context *ctx);
void fv_tell_exit(struct fv_context *ctx);
void fv_tell_soon(struct fv_context *ctx);
void fv_tell_event(struct fv_context *ctx, u32 index);
u32 fv_cq_event_index(struct fv_context *ctx);
void fv_cq_add(struct fv_cq *cq);
void fv_cq_del(struct fv_cq *cq);

/* The context of whoever calls: of a process, or the kernel's. */
static inline struct fv_context *fv_context_of(struct ib_device *ib, struct ib_udata *udata)
{
	struct fv_ucontext *uc = rdma_udata_to_drv_context(udata, struct fv_ucontext, ib);

	return uc ? &uc->ctx : &to_fv(ib)->kernel;
}

/* ib_queue.c: memory of queues */
struct fv_queue *fv_queue_new(struct fv_context *ctx, struct ib_udata *udata, u32 entries,
			      u32 bytes, struct mminfo *mi);
void fv_queue_del(struct fv_queue *queue);
void fv_queue_ring(const struct fv_queue *queue, struct farlane_ring *ring);
int fv_mmap(struct ib_ucontext *uc, struct vm_area_struct *vma);
void fv_mmap_free(struct rdma_user_mmap_entry *entry);
int fv_control_new(struct fv_context *ctx, struct fv_control *control);
void fv_control_del(struct fv_context *ctx, struct fv_control *control);
void fv_control_block(const struct fv_control *control, struct farlane_control_block *block);
void fv_controls_release(struct fv_context *ctx);

/* ib_port.c: attributes, the port, its network interface and GIDs */
int fv_query_device(struct ib_device *ib, struct ib_device_attr *attr, struct ib_udata *udata);
int fv_query_port(struct ib_device *ib, u32 port, struct ib_port_attr *attr);
int fv_port_immutable(struct ib_device *ib, u32 port, struct ib_port_immutable *immutable);
enum rdma_link_layer fv_link_layer(struct ib_device *ib, u32 port);
int fv_query_pkey(struct ib_device *ib, u32 port, u16 index, u16 *pkey);
struct net_device *fv_get_netdev(struct ib_device *ib, u32 port);
int fv_add_gid(const struct ib_gid_attr *attr, void **context);
int fv_del_gid(const struct ib_gid_attr *attr, void **context);
void fv_fw_str(struct ib_device *ib, char *text);
int fv_port_start(struct fv_device *dev, struct net_device *netdev);
void fv_port_listened_to(struct fv_device *dev);
void fv_port_stop(struct fv_device *dev);

/* ib_netdev.c: a network interface of its own */
int fv_own_netdev_add(struct fv_device *dev);
void fv_own_netdev_del(struct fv_device *dev);

/* ib_stats.c: counters of the port */
void fv_stats_init(struct fv_device *dev);

/* ib_memory.c: protection domains, registrations, memory windows */
int fv_alloc_pd(struct ib_pd *ibpd, struct ib_udata *udata);
int fv_dealloc_pd(struct ib_pd *ibpd, struct ib_udata *udata);
struct ib_mr *fv_reg_user_mr(struct ib_pd *ibpd, u64 start, u64 length, u64 iova, int access,
			     FV_DMAH_PARAMETER struct ib_udata *udata);
struct ib_mr *fv_rereg_user_mr(struct ib_mr *ibmr, int flags, u64 start, u64 length, u64 iova,
			       int access, struct ib_pd *ibpd, struct ib_udata *udata);
int fv_dereg_mr(struct ib_mr *ibmr, struct ib_udata *udata);
int fv_check_access(int *access);
int fv_alloc_mw(struct ib_mw *ibmw, struct ib_udata *udata);
int fv_dealloc_mw(struct ib_mw *ibmw);

/* ib_fast.c: registrations of the kernel */
struct ib_mr *fv_get_dma_mr(struct ib_pd *ibpd, int access);
struct ib_mr *fv_alloc_mr(struct ib_pd *ibpd, enum ib_mr_type type, u32 max_num_sg);
int fv_map_mr_sg(struct ib_mr *ibmr, struct scatterlist *sg, int count, unsigned int *offset);
int fv_fast_registration(const struct ib_reg_wr *wr, struct farlane_rxe_register *to);

/* ib_cq.c */
int fv_create_cq(struct ib_cq *ibcq, const struct ib_cq_init_attr *attr,
		 FV_CQ_ARGUMENT *argument);
int fv_resize_cq(struct ib_cq *ibcq, FV_CQE cqe, struct ib_udata *udata);
int fv_destroy_cq(struct ib_cq *ibcq, struct ib_udata *udata);

/* ib_poll.c: completions of the kernel */
int fv_poll_cq(struct ib_cq *ibcq, int count, struct ib_wc *wc);
int fv_req_notify_cq(struct ib_cq *ibcq, enum ib_cq_notify_flags flags);
bool fv_cq_wants_end(struct fv_cq *cq);
void fv_cq_forget(struct fv_cq *cq, u32 number);
void fv_queue_discard(struct fv_queue *queue, struct fv_cq *cq);

/* ib_srq.c */
int fv_create_srq(struct ib_srq *ibsrq, struct ib_srq_init_attr *init, struct ib_udata *udata);
int fv_modify_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr, enum ib_srq_attr_mask mask,
		  struct ib_udata *udata);
int fv_query_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr);
int fv_destroy_srq(struct ib_srq *ibsrq, struct ib_udata *udata);

/* ib_qp.c: queue pairs */
int fv_create_qp(struct ib_qp *ibqp, struct ib_qp_init_attr *init, struct ib_udata *udata);
int fv_modify_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask, struct ib_udata *udata);
int fv_query_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
		struct ib_qp_init_attr *init);
int fv_destroy_qp(struct ib_qp *ibqp, struct ib_udata *udata);

/* ib_post.c: requests of the kernel, and the doorbell of processes */
int fv_post_send(struct ib_qp *ibqp, const struct ib_send_wr *wr, const struct ib_send_wr **bad);
int fv_post_recv(struct ib_qp *ibqp, const struct ib_recv_wr *wr, const struct ib_recv_wr **bad);
int fv_post_srq_recv(struct ib_srq *ibsrq, const struct ib_recv_wr *wr,
		     const struct ib_recv_wr **bad);

/* ib_ah.c: address handles, multicast groups */
int fv_create_ah(struct ib_ah *ibah, struct rdma_ah_init_attr *init, struct ib_udata *udata);
int fv_create_user_ah(struct ib_ah *ibah, struct rdma_ah_init_attr *init, struct ib_udata *udata);
int fv_destroy_ah(struct ib_ah *ibah, u32 flags);
int fv_attach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid);
int fv_detach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid);

#endif
