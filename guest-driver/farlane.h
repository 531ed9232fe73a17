/* SPDX-License-Identifier: GPL-2.0 */
/* What the files of the farlane module share. */
#ifndef FARLANE_H
#define FARLANE_H

#include <linux/cdev.h>
#include <linux/completion.h>
#include <linux/device.h>
#include <linux/eventfd.h>
#include <linux/fs.h>
#include <linux/if_ether.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/poll.h>
#include <linux/rwsem.h>
#include <linux/semaphore.h>
#include <linux/spinlock.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "compat.h"
#include "farlane_abi.h"
#include "farlane_core.h"

/*
 * Locks, in the order in which they may be taken:
 *
 *	farlane.reset_lock
 *	farlane.contexts_lock
 *	farlane_context.segment_lock
 *	mm->mmap_lock			(taken by user access, page pinning; held by mmap)
 *	farlane_context.window_lock
 *	farlane_context.lock
 *	farlane.window_sem		(page faults of the window)
 *	farlane.event_lock, farlane.control_lock
 *
 * Those of device_memory.c are taken below mmap_lock, and only the innermost of these below them.
 *
 * Waiting for a control reply is like taking reset_lock's inner part: nothing that the reset takes
 * (contexts_lock, farlane_context.lock, window_sem) may be held then.
 */

/* A control request in flight. Whoever passes it to farlane_call() owns it again on return. */
struct farlane_call {
	struct list_head link;		/* farlane.calls, under control_lock */
	struct completion done;
	unsigned int ticks;		/* ticks of the watchdog it has seen */
	int err;			/* local outcome, then the reply counts */
	unsigned int written;		/* bytes of the reply that the device wrote */
	struct farlane_request request;
	struct farlane_reply reply;
};

struct farlane {
	struct device dev;
	struct cdev cdev;
	struct virtio_device *vdev;
	struct virtqueue *control_vq;
	struct virtqueue *event_vq;
	struct virtqueue *doorbell_vq;	/* used inside rcu_read_lock() while !dead */
	int minor;

	u32 features;
	u32 max_contexts;
	u32 max_regions;
	u32 max_events;
	u8 gid[16];
	u8 mac[ETH_ALEN];
	struct farlane_verbs *verbs;	/* NULL where the device serves no verbs to the kernel */
	u64 file_secret;		/* hides the addresses of inodes */

	/* Control queue. */
	spinlock_t control_lock;	/* control_vq, calls, generation, opened, writes of dead */
	struct list_head calls;
	struct semaphore slots;		/* requests that fit into the queue */
	u64 generation;			/* of the backend's device */
	unsigned int opened;		/* contexts that it has opened and not been told to close */
	bool dead;			/* never becomes false again */

	/* Life and death. */
	struct delayed_work watchdog;
	struct farlane_call ping;	/* of the watchdog alone */
	const char *condemned;		/* why the watchdog shall kill it, under control_lock */
	struct mutex reset_lock;	/* one reset at a time */
	struct completion quiesced;	/* device reset: it touches no memory any more */
	bool going;			/* driver unbound: it learns of no more device memory */

	/* Contexts. */
	struct mutex contexts_lock;	/* contexts, writes of table */
	struct list_head contexts;

	/* Event queue. */
	spinlock_t event_lock;		/* event_vq, table, and the contexts' event state */
	struct farlane_context **table;	/* by context id */
	struct farlane_event *event_buffers;
	struct work_struct event_work;

	/* Window. */
	u64 window_base;		/* guest-physical */
	u64 window_bytes;
	struct rw_semaphore window_sem;	/* read: a fault inserts pages; write: the window goes */
	bool window_gone;
};

enum farlane_region_state {
	FARLANE_REGION_BUSY,		/* owned by the ioctl that makes it or takes it away */
	FARLANE_REGION_LIVE,
};

/* Physically contiguous pages. */
struct farlane_run {
	struct page *page;
	unsigned long npages;
};

struct farlane_runs {
	struct farlane_runs *next;
	u32 count;
	u32 capacity;
	struct farlane_run run[] __counted_by(capacity);
};

struct farlane_region {
	u32 id;
	u32 kind;
	u32 flags;
	enum farlane_region_state state;	/* under farlane_context.lock */
	unsigned int maps;			/* vmas of a segment, under farlane_context.lock */
	u64 address;
	u64 length;
	unsigned long npages;
	struct mm_struct *mm;			/* whose locked memory it is charged to; or NULL */
	unsigned long accounted;		/* pages charged */
	struct farlane_runs *runs, *last_runs;
	unsigned long nruns;
	struct page **pages;			/* segment: each page, for mmap */
	struct farlane_device_memory *device;	/* device memory: what keeps watch over it */
	struct file *file;			/* file: kept while the backend knows it */
};

struct farlane_context {
	struct farlane *fl;
	u32 id;
	struct list_head link;			/* farlane.contexts, under contexts_lock */
	/* Of an open file; NULL for a context of the kernel's. */
	struct mm_struct *mm;			/* of the opener: its identity */
	struct address_space *mapping;
	/* Of a context that a module of the kernel has opened. */
	const struct farlane_client *client;
	void *client_data;
	bool charged;				/* its memory is charged to the calling process */
	struct farlane_call close_call;		/* so that closing needs no memory */

	struct mutex lock;			/* regions; never held across a wait */
	struct xarray regions;
	atomic_t files;				/* regions that are files */
	struct mutex segment_lock;		/* one SEGMENT at a time: the first is the header */

	struct mutex window_lock;		/* windows, scratch */
	struct list_head windows;
	struct page *scratch;			/* stands in for the window when that has gone */

	/* Under farlane.event_lock. */
	wait_queue_head_t wait;
	u64 wakes;
	struct eventfd_ctx **events;		/* by index, once one was bound */
	__le32 *dead_word;			/* in the header segment */
};

/* control.c */
void farlane_control_done(struct virtqueue *vq);
int farlane_call(struct farlane *fl, struct farlane_call *call,
		 struct farlane_extent *extents, u32 count);
int farlane_simple_call(struct farlane_context *ctx, struct farlane_call *call,
			u32 op, u32 region, u64 address, u64 length);
int farlane_take_away(struct farlane_context *ctx, struct farlane_call *call,
		      u32 op, u32 region);
void farlane_late(struct farlane *fl, unsigned int tries);

/* Pause before a backend that could not let go is asked again. */
#define FARLANE_AGAIN_MS 10

/* Whether memory may be let go after DETACH or CLOSE had this outcome. */
static inline bool farlane_let_go(int err)
{
	return !err || err == -ENOENT || err == -ENODEV;
}

/* lifecycle.c */
/* Of watchdogs and events: a disk behind the device may wait for them without memory. */
extern struct workqueue_struct *farlane_wq;
void farlane_watchdog(struct work_struct *work);
void farlane_drain(struct farlane *fl);
void farlane_kill(struct farlane *fl, const char *why);
void farlane_quiesce(struct farlane *fl);
void farlane_condemn(struct farlane *fl, const char *why);

/* event.c */
int farlane_event_start(struct farlane *fl);
void farlane_event_done(struct virtqueue *vq);
void farlane_event_work(struct work_struct *work);
int farlane_bind_event(struct farlane_context *ctx, u32 index, int fd);
void farlane_set_header(struct farlane_context *ctx, struct page *page);
void farlane_context_dead(struct farlane_context *ctx);
void farlane_context_forget_events(struct farlane_context *ctx);
ssize_t farlane_event_read(struct file *file, char __user *buf, size_t count,
			   loff_t *pos);
__poll_t farlane_event_poll(struct file *file, poll_table *wait);

/* context.c */
extern const struct file_operations farlane_fops;
struct farlane_context *farlane_context_new(struct farlane *fl);
int farlane_context_open(struct farlane_context *ctx);
void farlane_context_close(struct farlane_context *ctx);
void farlane_context_free(struct farlane_context *ctx);
int farlane_ring_doorbell(struct farlane *fl);

/* verbs.c */
void farlane_verbs_add(struct farlane *fl);
void farlane_verbs_del(struct farlane *fl);

/* memory.c */
bool farlane_check_range(const struct farlane_pin *arg);
struct farlane_region *farlane_region_new(u32 kind, u32 flags, u64 address,
					  u64 length);
int farlane_region_add(struct farlane_context *ctx,
		       struct farlane_region *region);
void farlane_region_del(struct farlane_context *ctx,
			struct farlane_region *region);
void farlane_region_live(struct farlane_context *ctx,
			 struct farlane_region *region);
void farlane_region_free(struct farlane_context *ctx,
			 struct farlane_region *region);
int farlane_attach(struct farlane_context *ctx,
		   struct farlane_region *region);
struct farlane_region *farlane_segment_new(struct farlane_context *ctx, u64 length);
int farlane_segment(struct farlane_context *ctx, struct farlane_segment *arg);
int farlane_pin(struct farlane_context *ctx, struct farlane_pin *arg);
int farlane_detach(struct farlane_context *ctx, u32 id);
int farlane_segment_mmap(struct farlane_context *ctx,
			 struct vm_area_struct *vma);
void farlane_memory_quiesced(struct farlane_context *ctx);
void farlane_memory_closed(struct farlane_context *ctx);
void farlane_memory_release(struct farlane_context *ctx);

/* pages.c */
int farlane_account(struct farlane_context *ctx, struct farlane_region *region,
		    unsigned long npages);
int farlane_pages_alloc(struct farlane_region *region);
int farlane_pages_pin(struct farlane_region *region);
void farlane_pages_free(struct farlane_context *ctx,
			struct farlane_region *region);

/* file.c */
int farlane_file(struct farlane_context *ctx, struct farlane_file *arg);
void farlane_file_free(struct farlane_context *ctx, struct file *file);

/* device_memory.c */
int farlane_device_memory_init(void);
void farlane_device_memory_exit(void);
int farlane_pin_device(struct farlane_context *ctx, struct farlane_pin *arg);
int farlane_device_memory_detach(struct farlane_device_memory *memory);
void farlane_device_memory_free(struct farlane_device_memory *memory);
void farlane_device_memory_revoke_all(struct farlane *fl);

/* window.c */
int farlane_window_init(struct farlane *fl, u64 bytes);
int farlane_window_mmap(struct farlane_context *ctx,
			struct vm_area_struct *vma);
void farlane_window_quiesced(struct farlane *fl);

#endif
