// SPDX-License-Identifier: GPL-2.0
/*
 * Regions of device memory: a BAR of a PCI device that the process has mapped.
 *
 * Such pages cannot be pinned: they have no struct page that keeps them. The region lives as long
 * as the mapping instead. An interval notifier says when a part of it is about to go, and does not
 * return before the backend has let go; the bus says when the device goes, for which not every
 * mapping is taken away. After that the region is an id with nothing behind it, until the process
 * detaches it.
 */
#include <linux/delay.h>
#include <linux/mmu_notifier.h>
#include <linux/pci.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "farlane.h"

/* Pages that are looked up between two chances to be rescheduled, or killed. */
#define WALK_BATCH 4096

/* How often a page may be faulted in and be gone again. */
#define MAX_FAULTS 8

struct farlane_device_memory {
	struct mmu_interval_notifier notifier;
	struct farlane_context *ctx;
	struct farlane_region *region;
	struct list_head link;		/* farlane_device_memories, or what a round has yet to ask */

	/*
	 * Held while the backend is told, and taken by the notifier: no memory is allocated under
	 * it, and no user memory touched. Not held from one try to the next.
	 */
	struct mutex lock;
	struct farlane_call call;	/* so that letting go needs no memory */
	struct pci_dev *pdev;
	bool attached;			/* the backend knows the region */
};

/*
 * Of all devices. farlane_round_lock is taken before farlane_devices_lock, and that before
 * farlane_device_memory.lock.
 */
static DEFINE_MUTEX(farlane_round_lock);	/* one round of farlane_device_ask() at a time */
static DEFINE_MUTEX(farlane_devices_lock);
static LIST_HEAD(farlane_device_memories);

/* Under lock: has the backend let go, if it can: see farlane_take_away(). */
static int farlane_device_try(struct farlane_device_memory *memory)
{
	int err;

	if (!memory->attached)
		return 0;
	err = farlane_simple_call(memory->ctx, &memory->call, FARLANE_OP_DETACH,
				  memory->region->id, 0, 0);
	if (farlane_let_go(err))
		memory->attached = false;
	return err;
}

/* Under lock: the same where the memory goes in any case. Whether it has gone. */
static bool farlane_device_try_revoke(struct farlane_device_memory *memory,
				      unsigned int tries)
{
	int err = farlane_device_try(memory);

	if (err == -EAGAIN) {
		farlane_late(memory->ctx->fl, tries);
		return false;
	}
	if (!farlane_let_go(err)) {
		farlane_condemn(memory->ctx->fl, "the backend refused to let go of device memory");
		memory->attached = false;
	}
	return true;
}

/* Called with mmap_lock or a lock of the file that is mapped. */
static bool farlane_device_invalidate(struct mmu_interval_notifier *notifier,
				      const struct mmu_notifier_range *range,
				      unsigned long seq)
{
	struct farlane_device_memory *memory =
		container_of(notifier, struct farlane_device_memory, notifier);

	unsigned int tries = 0;
	bool gone;

	if (!mmu_notifier_range_blockable(range))
		return false;
	mutex_lock(&memory->lock);
	/* Nobody attaches it again before this returns. */
	mmu_interval_set_seq(notifier, seq);
	/* This one only counts writes of the processor. */
	gone = range->event == MMU_NOTIFY_SOFT_DIRTY ||
	       farlane_device_try_revoke(memory, ++tries);
	mutex_unlock(&memory->lock);
	while (!gone) {
		msleep(FARLANE_AGAIN_MS);
		mutex_lock(&memory->lock);
		gone = farlane_device_try_revoke(memory, ++tries);
		mutex_unlock(&memory->lock);
	}
	return true;
}

static const struct mmu_interval_notifier_ops farlane_device_ops = {
	.invalidate = farlane_device_invalidate,
};

/*
 * Asks the backend once for each that is of @what, and returns whether all have gone. The first time
 * the backend waits a moment for what is under way, then it answers at once. So all are closed to
 * what would begin before the first one is asked again. Others register and release device memory
 * between two answers.
 */
static bool farlane_device_ask(bool (*is_of)(const struct farlane_device_memory *memory,
					     const void *what),
			       const void *what, unsigned int tries)
{
	struct farlane_device_memory *memory;
	bool gone = true;
	LIST_HEAD(left);

	mutex_lock(&farlane_round_lock);
	mutex_lock(&farlane_devices_lock);
	list_splice_init(&farlane_device_memories, &left);
	while ((memory = list_first_entry_or_null(&left, struct farlane_device_memory,
						  link))) {
		list_move_tail(&memory->link, &farlane_device_memories);
		mutex_lock(&memory->lock);
		/* The log is told of one of them. */
		if (is_of(memory, what) &&
		    !farlane_device_try_revoke(memory, gone ? tries : 0))
			gone = false;
		mutex_unlock(&memory->lock);
		mutex_unlock(&farlane_devices_lock);
		cond_resched();
		mutex_lock(&farlane_devices_lock);
	}
	mutex_unlock(&farlane_devices_lock);
	mutex_unlock(&farlane_round_lock);
	return gone;
}

/* Under lock. */
static bool farlane_device_is_memory_of(const struct farlane_device_memory *memory,
					const void *device)
{
	return memory->pdev && &memory->pdev->dev == device;
}

static bool farlane_device_is_known_to(const struct farlane_device_memory *memory,
				       const void *fl)
{
	return memory->ctx->fl == fl;
}

/* The device has left its bus; its addresses are not given to another before this returns. */
static int farlane_device_removed(struct notifier_block *block,
				  unsigned long action, void *data)
{
	unsigned int tries = 0;

	if (action != BUS_NOTIFY_REMOVED_DEVICE)
		return NOTIFY_DONE;
	while (!farlane_device_ask(farlane_device_is_memory_of, data, ++tries))
		msleep(FARLANE_AGAIN_MS);
	return NOTIFY_OK;
}

/**
 * farlane_device_memory_revoke_all - have the backend let go of all device memory that it knows
 * @fl: device that is going, so that none is attached any more
 */
void farlane_device_memory_revoke_all(struct farlane *fl)
{
	unsigned int tries = 0;

	while (!farlane_device_ask(farlane_device_is_known_to, fl, ++tries))
		msleep(FARLANE_AGAIN_MS);
}

static struct notifier_block farlane_bus_notifier = {
	.notifier_call = farlane_device_removed,
};

int farlane_device_memory_init(void)
{
	return bus_register_notifier(&pci_bus_type, &farlane_bus_notifier);
}

void farlane_device_memory_exit(void)
{
	bus_unregister_notifier(&pci_bus_type, &farlane_bus_notifier);
}

static int farlane_device_memory_new(struct farlane_context *ctx,
				     struct farlane_region *region)
{
	struct farlane_device_memory *memory;
	int err;

	memory = kzalloc(sizeof(*memory), GFP_KERNEL_ACCOUNT);
	if (!memory)
		return -ENOMEM;
	memory->ctx = ctx;
	memory->region = region;
	mutex_init(&memory->lock);
	err = mmu_interval_notifier_insert(&memory->notifier, ctx->mm,
					   region->address, region->length,
					   &farlane_device_ops);
	if (err) {
		kfree(memory);
		return err;
	}
	region->device = memory;
	mutex_lock(&farlane_devices_lock);
	list_add(&memory->link, &farlane_device_memories);
	mutex_unlock(&farlane_devices_lock);
	return 0;
}

/* The backend does not know the region, or the context is closed. Not under any lock. */
void farlane_device_memory_free(struct farlane_device_memory *memory)
{
	mutex_lock(&farlane_devices_lock);
	list_del(&memory->link);
	mutex_unlock(&farlane_devices_lock);
	mmu_interval_notifier_remove(&memory->notifier);
	pci_dev_put(memory->pdev);
	kfree(memory);
}

int farlane_device_memory_detach(struct farlane_device_memory *memory)
{
	unsigned int tries = 0;
	int err;

	for (;;) {
		mutex_lock(&memory->lock);
		err = farlane_device_try(memory);
		mutex_unlock(&memory->lock);
		if (err != -EAGAIN)
			return err;
		farlane_late(memory->ctx->fl, ++tries);
		msleep(FARLANE_AGAIN_MS);
	}
}

/* What is found where the region is mapped. */
struct farlane_walk {
	struct farlane_extent *extents;	/* all but the last one complete */
	u32 count;
	u32 max;
	u64 start;			/* of the last one */
	u64 end;
	u64 lowest;
	u64 highest;
};

static int farlane_walk_add(struct farlane_walk *walk, u64 page)
{
	if (!walk->count || page != walk->end) {
		if (walk->count == walk->max)
			return -E2BIG;
		walk->start = page;
		walk->count++;
	}
	walk->end = page + PAGE_SIZE;
	walk->extents[walk->count - 1] = (struct farlane_extent) {
		.address = cpu_to_le64(walk->start),
		.length = cpu_to_le64(walk->end - walk->start),
	};
	walk->lowest = min(walk->lowest, page);
	walk->highest = max(walk->highest, walk->end);
	return 0;
}

static int farlane_check_vma(struct farlane_region *region,
			     struct vm_area_struct *vma)
{
	if (!vma)
		return -EFAULT;
	/* Our own windows are memory of a host, and go without a word. */
	if (!(vma->vm_flags & VM_PFNMAP) || !(vma->vm_flags & VM_MAYSHARE) ||
	    !vma->vm_file || vma->vm_file->f_op == &farlane_fops)
		return -EINVAL;
	if (!(vma->vm_flags & VM_READ) ||
	    (region->flags & FARLANE_FLAG_WRITABLE && !(vma->vm_flags & VM_WRITE)))
		return -EACCES;
	return 0;
}

/* Under mmap_lock, which is let go of and taken again where a page is not there yet. */
static int farlane_walk_locked(struct farlane_region *region,
			       struct farlane_walk *walk)
{
	unsigned int fault = region->flags & FARLANE_FLAG_WRITABLE ? FAULT_FLAG_WRITE : 0;
	unsigned long address = region->address;
	unsigned long end = address + region->length;
	struct vm_area_struct *vma = NULL;
	unsigned int faults = 0;
	unsigned long pfn;
	bool unlocked;
	int err;

	while (address < end) {
		if (!((address >> PAGE_SHIFT) % WALK_BATCH)) {
			cond_resched();
			if (fatal_signal_pending(current))
				return -EINTR;
		}
		if (!vma || address >= vma->vm_end) {
			vma = vma_lookup(current->mm, address);
			err = farlane_check_vma(region, vma);
			if (err)
				return err;
		}
		if (farlane_follow_pfn(vma, address, &pfn)) {
			if (faults++ == MAX_FAULTS || fatal_signal_pending(current))
				return -EFAULT;
			vma = NULL;
			if (fixup_user_fault(current->mm, address, fault, &unlocked))
				return -EFAULT;
			continue;
		}
		err = farlane_walk_add(walk, PFN_PHYS(pfn));
		if (err)
			return err;
		address += PAGE_SIZE;
		faults = 0;
	}
	return 0;
}

/* The device that has all of this in one BAR; it is held. */
static struct pci_dev *farlane_find_device(u64 lowest, u64 highest)
{
	struct pci_dev *pdev = NULL;
	struct resource *bar;
	int i;

	for_each_pci_dev(pdev) {
		for (i = 0; i <= PCI_STD_RESOURCE_END; i++) {
			bar = &pdev->resource[i];
			if (resource_type(bar) == IORESOURCE_MEM && bar->parent &&
			    !(bar->flags & IORESOURCE_UNSET) &&
			    lowest >= bar->start && highest - 1 <= bar->end &&
			    pci_device_is_present(pdev))
				return pdev;
		}
	}
	return NULL;
}

/* Under lock: whose memory it is, and tells the backend. */
static int farlane_device_attach(struct farlane_device_memory *memory,
				 struct farlane_walk *walk)
{
	struct farlane_region *region = memory->region;
	struct farlane_call *call = &memory->call;
	int err;

	/* farlane_device_memory_revoke_all() does not come back for it. */
	if (READ_ONCE(memory->ctx->fl->going))
		return -ENODEV;
	/* That the device goes after it was found here, farlane_device_removed() is told. */
	pci_dev_put(memory->pdev);
	memory->pdev = farlane_find_device(walk->lowest, walk->highest);
	if (!memory->pdev)
		return -EINVAL;
	call->request = (struct farlane_request) {
		.op = cpu_to_le32(FARLANE_OP_ATTACH),
		.context = cpu_to_le32(memory->ctx->id),
		.region = cpu_to_le32(region->id),
		.kind = cpu_to_le32(region->kind),
		.flags = cpu_to_le32(region->flags),
		.address = cpu_to_le64(region->address),
		.length = cpu_to_le64(region->length),
	};
	err = farlane_call(memory->ctx->fl, call, walk->extents, walk->count);
	memory->attached = !err;
	return err;
}

/* Finds what is mapped until it stays so long enough for the backend to be told. */
static int farlane_device_describe(struct farlane_device_memory *memory)
{
	struct farlane_walk walk;
	struct farlane_extent *extents;
	unsigned long seq;
	bool changed;
	u32 max = min_t(unsigned long, memory->region->npages,
			FARLANE_MAX_EXTENTS_PER_REQUEST);
	int err;

	extents = kmalloc_array(max, sizeof(*extents), GFP_KERNEL);
	if (!extents)
		return -ENOMEM;
	do {
		walk = (struct farlane_walk) {
			.extents = extents,
			.max = max,
			.lowest = U64_MAX,
		};
		err = -EINTR;
		if (fatal_signal_pending(current))
			break;
		seq = mmu_interval_read_begin(&memory->notifier);
		err = mmap_read_lock_killable(current->mm);
		if (err)
			break;
		err = farlane_walk_locked(memory->region, &walk);
		mmap_read_unlock(current->mm);
		if (err)
			break;
		mutex_lock(&memory->lock);
		changed = mmu_interval_read_retry(&memory->notifier, seq);
		if (!changed)
			err = farlane_device_attach(memory, &walk);
		mutex_unlock(&memory->lock);
	} while (changed);
	kfree(extents);
	return err;
}

int farlane_pin_device(struct farlane_context *ctx, struct farlane_pin *arg)
{
	struct farlane_region *region;
	int err;

	if (arg->flags & ~FARLANE_FLAG_WRITABLE || !farlane_check_range(arg) ||
	    !PAGE_ALIGNED(arg->address) || !PAGE_ALIGNED(arg->length))
		return -EINVAL;
	if (!(ctx->fl->features & FARLANE_FEATURE_TUNNEL))
		return -EOPNOTSUPP;
	region = farlane_region_new(FARLANE_KIND_DEVICE, arg->flags,
				    arg->address, arg->length);
	if (!region)
		return -ENOMEM;
	err = farlane_device_memory_new(ctx, region);
	if (err)
		goto free;
	err = farlane_region_add(ctx, region);
	if (err)
		goto free;
	err = farlane_device_describe(region->device);
	if (err)
		goto del;
	arg->region = region->id;
	farlane_region_live(ctx, region);
	return 0;

del:
	farlane_region_del(ctx, region);
free:
	farlane_region_free(ctx, region);
	return err;
}
