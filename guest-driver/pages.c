// SPDX-License-Identifier: GPL-2.0
/* The pages of a region: allocated, or pinned, kept as physically contiguous runs. */
#include <linux/cred.h>
#include <linux/capability.h>
#include <linux/log2.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "farlane.h"

#define MAX_ORDER_WANTED 10
#define FIRST_RUNS 8
#define MORE_RUNS ((PAGE_SIZE - sizeof(struct farlane_runs)) / \
		   sizeof(struct farlane_run))
#define PIN_BATCH (PAGE_SIZE / sizeof(struct page *))
/* Pages that are let go between two chances to be rescheduled. */
#define FREE_BATCH 16384UL

/*
 * Charges pages that cannot be swapped to the calling process, as RDMA drivers do: segments too,
 * since the kernel memory of one process would otherwise be limited by nothing.
 */
int farlane_account(struct farlane_context *ctx, struct farlane_region *region,
		    unsigned long npages)
{
	unsigned long limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;
	struct mm_struct *mm = current->mm;

	if (!ctx->charged)
		return 0;
	if (atomic64_add_return(npages, &mm->pinned_vm) > limit &&
	    !capable(CAP_IPC_LOCK)) {
		atomic64_sub(npages, &mm->pinned_vm);
		return -ENOMEM;
	}
	mmgrab(mm);
	region->mm = mm;
	region->accounted = npages;
	return 0;
}

/* Appends contiguous pages to the last run, or as a run of their own. */
static int farlane_add_run(struct farlane_region *region, struct page *page,
			   unsigned long npages)
{
	struct farlane_runs *runs = region->last_runs;
	struct farlane_run *last;
	u32 capacity;

	if (runs) {
		last = &runs->run[runs->count - 1];
		/* Neighbours in the memory map and in memory. */
		if (last->page + last->npages == page &&
		    page_to_pfn(last->page) + last->npages == page_to_pfn(page)) {
			last->npages += npages;
			return 0;
		}
	}
	if (!runs || runs->count == runs->capacity) {
		capacity = min(runs ? MORE_RUNS : FIRST_RUNS, region->npages);
		runs = kmalloc(struct_size(runs, run, capacity),
			       GFP_KERNEL_ACCOUNT);
		if (!runs)
			return -ENOMEM;
		runs->next = NULL;
		runs->count = 0;
		runs->capacity = capacity;
		if (region->last_runs)
			region->last_runs->next = runs;
		else
			region->runs = runs;
		region->last_runs = runs;
	}
	runs->run[runs->count].page = page;
	runs->run[runs->count].npages = npages;
	runs->count++;
	region->nruns++;
	return 0;
}

static struct page *farlane_alloc_block(unsigned int *order)
{
	gfp_t gfp = GFP_KERNEL_ACCOUNT | __GFP_ZERO;
	struct page *page;

	for (; *order; --*order) {
		page = alloc_pages(gfp | __GFP_NOWARN | __GFP_NORETRY, *order);
		if (page) {
			/* Each page is mapped, and may be pinned, on its own. */
			split_page(page, *order);
			return page;
		}
	}
	return alloc_page(gfp);
}

/* Allocates region->npages zeroed pages in blocks as large as there are. */
int farlane_pages_alloc(struct farlane_region *region)
{
	unsigned int order = MAX_ORDER_WANTED;
	unsigned long done = 0, i;
	struct page *page;
	int err;

	region->pages = kvcalloc(region->npages, sizeof(*region->pages),
				 GFP_KERNEL_ACCOUNT);
	if (!region->pages)
		return -ENOMEM;
	while (done < region->npages) {
		if (fatal_signal_pending(current))
			return -EINTR;
		order = min_t(unsigned int, order,
			      ilog2(region->npages - done));
		page = farlane_alloc_block(&order);
		if (!page)
			return -ENOMEM;
		err = farlane_add_run(region, page, 1UL << order);
		if (err) {
			for (i = 0; i < 1UL << order; i++)
				__free_page(page + i);
			return err;
		}
		for (i = 0; i < 1UL << order; i++)
			region->pages[done++] = page + i;
		cond_resched();
	}
	return 0;
}

/* Takes a batch of pinned pages into the region; those it cannot take are let go. */
static int farlane_take_pinned(struct farlane_region *region,
			       struct page **pages, unsigned long count)
{
	unsigned long i;
	int err = 0;

	for (i = 0; i < count; i++) {
		/* Device memory is not in the backend's view of the guest. */
		if (is_zone_device_page(pages[i]))
			err = -EOPNOTSUPP;
		else
			err = farlane_add_run(region, pages[i], 1);
		if (err) {
			unpin_user_pages(pages + i, count - i);
			return err;
		}
	}
	return 0;
}

/* Pins the caller's pages under region->address and region->length. */
int farlane_pages_pin(struct farlane_region *region)
{
	unsigned long start = region->address & PAGE_MASK;
	unsigned long done = 0, want;
	unsigned int flags = FOLL_LONGTERM;
	struct page **pages;
	int count, err = 0;

	if (region->flags & FARLANE_FLAG_WRITABLE)
		flags |= FOLL_WRITE;
	else
		flags |= FARLANE_GUP_READ_ONLY;
	pages = kmalloc_array(PIN_BATCH, sizeof(*pages), GFP_KERNEL);
	if (!pages)
		return -ENOMEM;
	while (done < region->npages) {
		err = -EINTR;
		if (fatal_signal_pending(current))
			break;
		want = min_t(unsigned long, PIN_BATCH, region->npages - done);
		count = pin_user_pages_fast(start + (done << PAGE_SHIFT), want,
					    flags, pages);
		err = count ? count : -EFAULT;
		if (count <= 0)
			break;
		err = farlane_take_pinned(region, pages, count);
		if (err)
			break;
		done += count;
		cond_resched();
	}
	kfree(pages);
	return err;
}

static void farlane_free_run(struct farlane_region *region,
			     struct farlane_run *run)
{
	unsigned long done = 0, count, i;

	while (done < run->npages) {
		count = min(FREE_BATCH, run->npages - done);
		if (region->kind == FARLANE_KIND_PIN)
			unpin_user_page_range_dirty_lock(run->page + done, count,
							 region->flags & FARLANE_FLAG_WRITABLE);
		else
			for (i = 0; i < count; i++)
				__free_page(run->page + done + i);
		done += count;
		cond_resched();
	}
}

/* Lets go of the pages, and of what they were charged. The device does not touch them. */
void farlane_pages_free(struct farlane_context *ctx,
			struct farlane_region *region)
{
	struct farlane_runs *runs = region->runs, *next;
	u32 i;

	for (; runs; runs = next) {
		next = runs->next;
		for (i = 0; i < runs->count; i++)
			farlane_free_run(region, &runs->run[i]);
		kfree(runs);
	}
	region->runs = NULL;
	region->last_runs = NULL;
	kvfree(region->pages);
	region->pages = NULL;
	if (region->mm) {
		atomic64_sub(region->accounted, &region->mm->pinned_vm);
		mmdrop(region->mm);
		region->mm = NULL;
	}
}
