// SPDX-License-Identifier: GPL-2.0
/*
 * The window: host-allocated buffers in the virtio shared-memory region, mapped by processes.
 *
 * The window is ordinary memory of the host, so it is mapped cached. Its page tables are filled
 * with bare page frame numbers: struct pages (as virtio-fs has) would cost 1/64 of the window in
 * guest memory, and references to them could outlive a hot-unplug of the device.
 */
#include <linux/ioport.h>
#include <linux/sizes.h>
#include <linux/slab.h>

#include "farlane.h"

#define FARLANE_WINDOW_PGOFF (FARLANE_WINDOW_MMAP_BASE >> PAGE_SHIFT)

/* A buffer of the window that a context has mapped. */
struct farlane_window {
	struct list_head link;		/* farlane_context.windows, under window_lock */
	u64 offset;
	u64 length;
	unsigned int maps;		/* vmas, under window_lock */
	struct farlane_call call;	/* so that unmapping needs no memory */
};

int farlane_window_init(struct farlane *fl, u64 bytes)
{
	struct device *dev = &fl->vdev->dev;
	struct virtio_shm_region shm;

	if (!(fl->features & FARLANE_FEATURE_WINDOW))
		return 0;
	if (!virtio_get_shm_region(fl->vdev, &shm, FARLANE_WINDOW_SHMEM_ID) ||
	    !bytes || bytes > shm.len || !PAGE_ALIGNED(bytes) ||
	    !PAGE_ALIGNED(shm.addr)) {
		dev_warn(dev, "no usable window\n");
		goto none;
	}
	if (!devm_request_mem_region(dev, shm.addr, bytes, "farlane")) {
		dev_warn(dev, "window at 0x%llx is taken\n", shm.addr);
		goto none;
	}
	fl->window_base = shm.addr;
	fl->window_bytes = bytes;
	return 0;
none:
	/* Buffers fall back to guest memory. */
	fl->features &= ~FARLANE_FEATURE_WINDOW;
	return 0;
}

struct farlane_insert {
	struct vm_area_struct *vma;
	unsigned long pfn;
	unsigned long step;
};

static int farlane_insert_pte(pte_t *pte, unsigned long addr, void *data)
{
	struct farlane_insert *in = data;
	struct vm_area_struct *vma = in->vma;

	if (pte_none(ptep_get(pte)))
		set_pte_at(vma->vm_mm, addr, pte,
			   pte_mkspecial(pfn_pte(in->pfn, vma->vm_page_prot)));
	in->pfn += in->step;
	return 0;
}

/*
 * Inserts the pages of the 2 MiB around the fault. Not with vmf_insert_pfn(): on x86 that asks the
 * table of memory types, which makes everything uncached that firmware placed below 4 GiB.
 */
static vm_fault_t farlane_window_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct farlane_context *ctx = vma->vm_file->private_data;
	struct farlane *fl = ctx->fl;
	unsigned long addr = max(ALIGN_DOWN(vmf->address, SZ_2M), vma->vm_start);
	unsigned long end = min(ALIGN_DOWN(vmf->address, SZ_2M) + SZ_2M, vma->vm_end);
	struct farlane_insert in = { .vma = vma };
	int err;

	down_read(&fl->window_sem);
	if (fl->window_gone) {
		in.pfn = page_to_pfn(ctx->scratch);
	} else {
		in.pfn = PHYS_PFN(fl->window_base) + vma->vm_pgoff - FARLANE_WINDOW_PGOFF +
			 ((addr - vma->vm_start) >> PAGE_SHIFT);
		in.step = 1;
	}
	err = apply_to_page_range(vma->vm_mm, addr, end - addr, farlane_insert_pte, &in);
	up_read(&fl->window_sem);
	return err ? VM_FAULT_OOM : VM_FAULT_NOPAGE;
}

static void farlane_window_vm_open(struct vm_area_struct *vma)
{
	struct farlane_context *ctx = vma->vm_file->private_data;
	struct farlane_window *window = vma->vm_private_data;

	mutex_lock(&ctx->window_lock);
	window->maps++;
	mutex_unlock(&ctx->window_lock);
}

/* Under window_lock. */
static void farlane_window_put(struct farlane_context *ctx,
			       struct farlane_window *window)
{
	if (--window->maps)
		return;
	list_del(&window->link);
	farlane_simple_call(ctx, &window->call, FARLANE_OP_WINDOW_UNMAP, 0,
			    window->offset, window->length);
	kfree(window);
}

static void farlane_window_vm_close(struct vm_area_struct *vma)
{
	struct farlane_context *ctx = vma->vm_file->private_data;

	mutex_lock(&ctx->window_lock);
	farlane_window_put(ctx, vma->vm_private_data);
	mutex_unlock(&ctx->window_lock);
}

static int farlane_window_may_split(struct vm_area_struct *vma,
				    unsigned long addr)
{
	return -EINVAL;
}

static const struct vm_operations_struct farlane_window_vm_ops = {
	.open = farlane_window_vm_open,
	.close = farlane_window_vm_close,
	.may_split = farlane_window_may_split,
	.fault = farlane_window_fault,
};

/* Under window_lock: the record of a buffer, which the backend must have granted. */
static struct farlane_window *farlane_window_get(struct farlane_context *ctx,
						 u64 offset, u64 length)
{
	struct farlane_window *window;
	int err;

	list_for_each_entry(window, &ctx->windows, link) {
		if (window->offset == offset && window->length == length) {
			window->maps++;
			return window;
		}
	}
	window = kzalloc(sizeof(*window), GFP_KERNEL_ACCOUNT);
	if (!window)
		return ERR_PTR(-ENOMEM);
	err = farlane_simple_call(ctx, &window->call, FARLANE_OP_WINDOW_MAP, 0,
				  offset, length);
	if (err) {
		kfree(window);
		return ERR_PTR(err);
	}
	window->offset = offset;
	window->length = length;
	window->maps = 1;
	list_add(&window->link, &ctx->windows);
	return window;
}

int farlane_window_mmap(struct farlane_context *ctx,
			struct vm_area_struct *vma)
{
	struct farlane *fl = ctx->fl;
	u64 offset = (u64)(vma->vm_pgoff - FARLANE_WINDOW_PGOFF) << PAGE_SHIFT;
	u64 length = vma->vm_end - vma->vm_start;
	struct farlane_window *window;

	if (!fl->window_bytes)
		return -EOPNOTSUPP;
	if (vma->vm_pgoff - FARLANE_WINDOW_PGOFF >= fl->window_bytes >> PAGE_SHIFT ||
	    length > fl->window_bytes - offset)
		return -EINVAL;
	mutex_lock(&ctx->window_lock);
	if (!ctx->scratch)
		ctx->scratch = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	if (ctx->scratch)
		window = farlane_window_get(ctx, offset, length);
	else
		window = ERR_PTR(-ENOMEM);
	mutex_unlock(&ctx->window_lock);
	if (IS_ERR(window))
		return PTR_ERR(window);
	farlane_vm_flags(vma, VM_IO | VM_PFNMAP, 0);
	vma->vm_private_data = window;
	vma->vm_ops = &farlane_window_vm_ops;
	return 0;
}

/*
 * The device has been reset and the addresses of the window may soon belong to something else.
 * Processes that still look at a buffer get a scratch page, not a SIGBUS that would overtake the
 * news of the death.
 */
void farlane_window_quiesced(struct farlane *fl)
{
	struct farlane_context *ctx;

	down_write(&fl->window_sem);
	fl->window_gone = true;
	up_write(&fl->window_sem);

	mutex_lock(&fl->contexts_lock);
	list_for_each_entry(ctx, &fl->contexts, link)
		if (ctx->mapping)
			unmap_mapping_range(ctx->mapping, FARLANE_WINDOW_MMAP_BASE, 0, 1);
	mutex_unlock(&fl->contexts_lock);
}
