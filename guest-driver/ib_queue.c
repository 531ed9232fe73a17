// SPDX-License-Identifier: GPL-2.0
/*
 * Memory of queues: rings, which a process or this module has mapped, and control blocks, which no
 * process has.
 * zero-copy/abi/src/rxe.rs describes both.
 */
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "compat.h"
#include "ib.h"

#define CONTROLS (PAGE_SIZE / FARLANE_CONTROL_BYTES)

/* A page of control blocks. */
struct fv_controls {
	struct list_head link;		/* fv_context.controls, under controls_lock */
	struct farlane_shared memory;
	DECLARE_BITMAP(used, CONTROLS);
};

static int fv_queue_for_process(struct fv_queue *queue, struct ib_udata *udata, u64 length,
				struct mminfo *mi)
{
	struct fv_ucontext *uc = rdma_udata_to_drv_context(udata, struct fv_ucontext, ib);
	struct rxe_queue_buf *buf = page_address(queue->memory.pages[0]);
	int err;

	/* For the process: neither the backend nor this module looks at them. */
	buf->log2_elem_size = ilog2(queue->stride);
	buf->index_mask = queue->slots - 1;
	err = rdma_user_mmap_entry_insert(&uc->ib, &queue->entry, length);
	if (err)
		return err;
	mi->offset = rdma_user_mmap_get_offset(&queue->entry);
	mi->size = length;
	mi->pad = 0;
	return 0;
}

static int fv_queue_for_kernel(struct fv_queue *queue)
{
	queue->base = vmap(queue->memory.pages, queue->memory.npages, VM_MAP, PAGE_KERNEL);
	return queue->base ? 0 : -ENOMEM;
}

/**
 * fv_queue_new - allocate a ring
 * @ctx: context
 * @udata: of its process; NULL for the kernel
 * @entries: that can wait in it at least: one element stays free
 * @bytes: length of one
 * @mi: gets the token by which a process maps it
 *
 * Return: the ring, or an error number.
 */
struct fv_queue *fv_queue_new(struct fv_context *ctx, struct ib_udata *udata, u32 entries,
			      u32 bytes, struct mminfo *mi)
{
	struct fv_queue *queue;
	u64 length;
	int err;

	if (bytes > FARLANE_RING_MAX_STRIDE || entries >= FARLANE_MAX_SEGMENT_BYTES)
		return ERR_PTR(-EINVAL);
	queue = kzalloc(sizeof(*queue), GFP_KERNEL_ACCOUNT);
	if (!queue)
		return ERR_PTR(-ENOMEM);
	queue->ctx = ctx;
	queue->slots = max(roundup_pow_of_two(entries + 1), 2UL);
	queue->stride = max(roundup_pow_of_two(bytes), (unsigned long)FARLANE_RING_MIN_STRIDE);
	length = PAGE_ALIGN(sizeof(struct rxe_queue_buf) + (u64)queue->slots * queue->stride);
	err = farlane_client_segment(ctx->core, length, &queue->memory);
	if (err)
		goto free;
	if (udata)
		err = fv_queue_for_process(queue, udata, length, mi);
	else
		err = fv_queue_for_kernel(queue);
	if (err)
		goto detach;
	return queue;

detach:
	farlane_client_detach(ctx->core, queue->memory.region);
free:
	kfree(queue);
	return ERR_PTR(err);
}

static void fv_queue_free(struct fv_queue *queue)
{
	farlane_client_detach(queue->ctx->core, queue->memory.region);
	kfree(queue);
}

/* The backend knows the queue no more. */
void fv_queue_del(struct fv_queue *queue)
{
	if (!queue)
		return;
	if (!queue->base) {
		rdma_user_mmap_entry_remove(&queue->entry);
		return;
	}
	kvfree(queue->requests);
	vunmap(queue->base);
	fv_queue_free(queue);
}

/* Nobody can map it any more; who has, keeps its pages. */
void fv_mmap_free(struct rdma_user_mmap_entry *entry)
{
	fv_queue_free(container_of(entry, struct fv_queue, entry));
}

int fv_mmap(struct ib_ucontext *uc, struct vm_area_struct *vma)
{
	struct rdma_user_mmap_entry *entry;
	struct fv_queue *queue;
	unsigned long left;
	int err;

	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	if (vma->vm_flags & VM_EXEC)
		return -EACCES;
	/* Of just this length. */
	entry = rdma_user_mmap_entry_get(uc, vma);
	if (!entry)
		return -EINVAL;
	queue = container_of(entry, struct fv_queue, entry);
	farlane_vm_flags(vma, VM_DONTEXPAND | VM_DONTDUMP, VM_MAYEXEC);
	left = queue->memory.npages;
	err = vm_insert_pages(vma, vma->vm_start, queue->memory.pages, &left);
	rdma_user_mmap_entry_put(entry);
	return err;
}

void fv_queue_ring(const struct fv_queue *queue, struct farlane_ring *ring)
{
	if (!queue)
		return;
	ring->region = cpu_to_le32(queue->memory.region);
	ring->slots = cpu_to_le32(queue->slots);
	ring->stride = cpu_to_le32(queue->stride);
}

/* Under controls_lock. */
static struct fv_controls *fv_controls_with_room(struct fv_context *ctx)
{
	struct fv_controls *controls;
	int err;

	list_for_each_entry(controls, &ctx->controls, link)
		if (!bitmap_full(controls->used, CONTROLS))
			return controls;
	controls = kzalloc(sizeof(*controls), GFP_KERNEL_ACCOUNT);
	if (!controls)
		return ERR_PTR(-ENOMEM);
	err = farlane_client_segment(ctx->core, PAGE_SIZE, &controls->memory);
	if (err) {
		kfree(controls);
		return ERR_PTR(err);
	}
	list_add(&controls->link, &ctx->controls);
	return controls;
}

/* A control block, all zeros. */
int fv_control_new(struct fv_context *ctx, struct fv_control *control)
{
	struct fv_controls *controls;
	unsigned int at;
	int err = 0;

	mutex_lock(&ctx->controls_lock);
	controls = fv_controls_with_room(ctx);
	if (IS_ERR(controls)) {
		err = PTR_ERR(controls);
	} else {
		at = find_first_zero_bit(controls->used, CONTROLS);
		__set_bit(at, controls->used);
		control->page = controls;
		control->offset = at * FARLANE_CONTROL_BYTES;
		control->base = page_address(controls->memory.pages[0]) + control->offset;
		memset(control->base, 0, FARLANE_CONTROL_BYTES);
	}
	mutex_unlock(&ctx->controls_lock);
	return err;
}

/* The backend knows the queue no more. The page stays for the next one. */
void fv_control_del(struct fv_context *ctx, struct fv_control *control)
{
	if (!control->page)
		return;
	mutex_lock(&ctx->controls_lock);
	__clear_bit(control->offset / FARLANE_CONTROL_BYTES, control->page->used);
	mutex_unlock(&ctx->controls_lock);
	control->page = NULL;
}

void fv_control_block(const struct fv_control *control, struct farlane_control_block *block)
{
	block->region = cpu_to_le32(control->page->memory.region);
	block->offset = cpu_to_le32(control->offset);
}

/* The context is closed, and its segments with it. */
void fv_controls_release(struct fv_context *ctx)
{
	struct fv_controls *controls, *next;

	list_for_each_entry_safe(controls, next, &ctx->controls, link)
		kfree(controls);
}
