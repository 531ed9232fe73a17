// SPDX-License-Identifier: GPL-2.0
/* Regions: segments that process and backend share, and pinned memory of the process. */
#include <linux/overflow.h>
#include <linux/slab.h>

#include "farlane.h"

/* Whether the range of a pin is one that a region can have. */
bool farlane_check_range(const struct farlane_pin *arg)
{
	unsigned long end;

	return arg->length && arg->length <= FARLANE_MAX_REGION_BYTES &&
	       arg->address == (unsigned long)arg->address &&
	       !check_add_overflow((unsigned long)arg->address,
				   (unsigned long)arg->length, &end) &&
	       end <= ULONG_MAX - PAGE_SIZE;
}

struct farlane_region *farlane_region_new(u32 kind, u32 flags, u64 address,
					  u64 length)
{
	struct farlane_region *region;

	region = kzalloc(sizeof(*region), GFP_KERNEL_ACCOUNT);
	if (!region)
		return NULL;
	region->kind = kind;
	region->flags = flags;
	region->address = address;
	region->length = length;
	region->npages = PAGE_ALIGN(offset_in_page(address) + length) >>
			 PAGE_SHIFT;
	region->state = FARLANE_REGION_BUSY;
	return region;
}

void farlane_region_free(struct farlane_context *ctx,
			 struct farlane_region *region)
{
	if (region->device)
		farlane_device_memory_free(region->device);
	if (region->file)
		farlane_file_free(ctx, region->file);
	farlane_pages_free(ctx, region);
	kfree(region);
}

/* Reserves an id. The region stays BUSY. */
int farlane_region_add(struct farlane_context *ctx,
		       struct farlane_region *region)
{
	int err;

	mutex_lock(&ctx->lock);
	err = xa_alloc(&ctx->regions, &region->id, region,
		       XA_LIMIT(0, ctx->fl->max_regions - 1),
		       GFP_KERNEL_ACCOUNT);
	mutex_unlock(&ctx->lock);
	return err == -EBUSY ? -ENOSPC : err;
}

void farlane_region_del(struct farlane_context *ctx,
			struct farlane_region *region)
{
	mutex_lock(&ctx->lock);
	xa_erase(&ctx->regions, region->id);
	mutex_unlock(&ctx->lock);
}

void farlane_region_live(struct farlane_context *ctx,
			 struct farlane_region *region)
{
	mutex_lock(&ctx->lock);
	region->state = FARLANE_REGION_LIVE;
	mutex_unlock(&ctx->lock);
}

/* A place in the list of runs of a region. */
struct farlane_cursor {
	struct farlane_runs *runs;
	u32 index;
	u64 offset;	/* into the first page */
	u64 left;	/* bytes */
};

/* Writes the next extents, exact to the byte, and returns how many. */
static u32 farlane_extents(struct farlane_cursor *at,
			   struct farlane_extent *extents, u32 max)
{
	struct farlane_run *run;
	u32 count = 0;
	u64 length;

	while (count < max && at->runs && at->left) {
		run = &at->runs->run[at->index];
		length = ((u64)run->npages << PAGE_SHIFT) - at->offset;
		length = min(length, at->left);
		extents[count].address = cpu_to_le64(page_to_phys(run->page) +
						     at->offset);
		extents[count].length = cpu_to_le64(length);
		count++;
		at->offset = 0;
		at->left -= length;
		if (++at->index == at->runs->count) {
			at->runs = at->runs->next;
			at->index = 0;
		}
	}
	return count;
}

/* Describes the region to the backend. */
static int farlane_attach_extents(struct farlane_context *ctx,
				  struct farlane_region *region,
				  struct farlane_call *call, bool *known)
{
	u32 max = min_t(unsigned long, region->nruns,
			FARLANE_MAX_EXTENTS_PER_REQUEST);
	struct farlane_cursor at = {
		.runs = region->runs,
		.offset = offset_in_page(region->address),
		.left = region->length,
	};
	struct farlane_extent *extents;
	int err;

	*known = false;
	extents = kmalloc_array(max, sizeof(*extents), GFP_KERNEL);
	if (!extents)
		return -ENOMEM;
	call->request = (struct farlane_request) {
		.op = cpu_to_le32(FARLANE_OP_ATTACH),
		.context = cpu_to_le32(ctx->id),
		.region = cpu_to_le32(region->id),
		.kind = cpu_to_le32(region->kind),
		.flags = cpu_to_le32(region->flags),
		.address = cpu_to_le64(region->address),
		.length = cpu_to_le64(region->length),
	};
	err = farlane_call(ctx->fl, call, extents,
			   farlane_extents(&at, extents, max));
	while (!err && at.left) {
		*known = true;
		call->request = (struct farlane_request) {
			.op = cpu_to_le32(FARLANE_OP_ATTACH_MORE),
			.context = cpu_to_le32(ctx->id),
			.region = cpu_to_le32(region->id),
		};
		err = farlane_call(ctx->fl, call, extents,
				   farlane_extents(&at, extents, max));
	}
	kfree(extents);
	return err;
}

/* Gives the region an id and makes it known. On failure nothing is left of it. */
int farlane_attach(struct farlane_context *ctx,
		   struct farlane_region *region)
{
	struct farlane_call *call;
	bool known;
	int err;

	call = kzalloc(sizeof(*call), GFP_KERNEL_ACCOUNT);
	if (!call) {
		err = -ENOMEM;
		goto free;
	}
	err = farlane_region_add(ctx, region);
	if (err)
		goto free;
	err = farlane_attach_extents(ctx, region, call, &known);
	if (!err) {
		kfree(call);
		return 0;
	}
	if (known && err != -ENODEV &&
	    !farlane_let_go(farlane_take_away(ctx, call, FARLANE_OP_DETACH,
					      region->id))) {
		/* The backend keeps it: so must we, until the context is closed. */
		farlane_region_live(ctx, region);
		kfree(call);
		return err;
	}
	farlane_region_del(ctx, region);
free:
	farlane_region_free(ctx, region);
	kfree(call);
	return err;
}

/* A new segment, still BUSY; the first one of a context holds its header. */
struct farlane_region *farlane_segment_new(struct farlane_context *ctx, u64 length)
{
	struct farlane_region *region;
	bool first;
	int err;

	if (!length || length > FARLANE_MAX_SEGMENT_BYTES)
		return ERR_PTR(-EINVAL);
	mutex_lock(&ctx->segment_lock);
	first = !ctx->dead_word;
	err = -EINVAL;
	if (first && length < FARLANE_HEADER_SEGMENT_BYTES)
		goto unlock;
	err = -ENOMEM;
	region = farlane_region_new(FARLANE_KIND_SEGMENT, FARLANE_FLAG_WRITABLE,
				    0, PAGE_ALIGN(length));
	if (!region)
		goto unlock;
	err = farlane_account(ctx, region, region->npages);
	if (!err)
		err = farlane_pages_alloc(region);
	if (err) {
		farlane_region_free(ctx, region);
		goto unlock;
	}
	err = farlane_attach(ctx, region);
	if (err)
		goto unlock;
	if (first)
		farlane_set_header(ctx, region->pages[0]);
unlock:
	mutex_unlock(&ctx->segment_lock);
	return err ? ERR_PTR(err) : region;
}

int farlane_segment(struct farlane_context *ctx, struct farlane_segment *arg)
{
	struct farlane_region *region;

	if (arg->reserved)
		return -EINVAL;
	region = farlane_segment_new(ctx, arg->length);
	if (IS_ERR(region))
		return PTR_ERR(region);
	arg->length = region->length;
	arg->region = region->id;
	arg->mmap_offset = (u64)region->id << FARLANE_SEGMENT_SHIFT;
	farlane_region_live(ctx, region);
	return 0;
}

int farlane_pin(struct farlane_context *ctx, struct farlane_pin *arg)
{
	struct farlane_region *region;
	int err;

	if (arg->flags & ~(FARLANE_FLAG_WRITABLE | FARLANE_FLAG_PHONY) ||
	    !farlane_check_range(arg))
		return -EINVAL;
	if (arg->flags & FARLANE_FLAG_PHONY) {
		if (!PAGE_ALIGNED(arg->address) || !PAGE_ALIGNED(arg->length))
			return -EINVAL;
		if (!(ctx->fl->features & FARLANE_FEATURE_TUNNEL))
			return -EOPNOTSUPP;
	}
	region = farlane_region_new(FARLANE_KIND_PIN, arg->flags, arg->address,
				    arg->length);
	if (!region)
		return -ENOMEM;
	err = farlane_account(ctx, region, region->npages);
	if (!err)
		err = farlane_pages_pin(region);
	if (err) {
		farlane_region_free(ctx, region);
		return err;
	}
	err = farlane_attach(ctx, region);
	if (err)
		return err;
	arg->region = region->id;
	farlane_region_live(ctx, region);
	return 0;
}

/* Whether the region is the segment whose first page holds the context's header. */
static bool farlane_is_header(struct farlane_context *ctx,
			      struct farlane_region *region)
{
	return region->kind == FARLANE_KIND_SEGMENT && ctx->dead_word &&
	       virt_to_page(ctx->dead_word) == region->pages[0];
}

/* Takes a region away. The header stays as long as the context. */
int farlane_detach(struct farlane_context *ctx, u32 id)
{
	struct farlane_region *region;
	struct farlane_call *call;
	int err;

	call = kzalloc(sizeof(*call), GFP_KERNEL_ACCOUNT);
	if (!call)
		return -ENOMEM;
	mutex_lock(&ctx->lock);
	region = xa_load(&ctx->regions, id);
	if (!region)
		err = -ENOENT;
	else if (region->state != FARLANE_REGION_LIVE || region->maps ||
		 farlane_is_header(ctx, region))
		err = -EBUSY;
	else
		err = 0;
	if (!err)
		region->state = FARLANE_REGION_BUSY;
	mutex_unlock(&ctx->lock);
	if (err)
		goto free;

	if (region->device)
		err = farlane_device_memory_detach(region->device);
	else
		err = farlane_take_away(ctx, call, FARLANE_OP_DETACH, id);
	if (farlane_let_go(err)) {
		farlane_region_del(ctx, region);
		farlane_region_free(ctx, region);
	} else {
		farlane_region_live(ctx, region);
	}
free:
	kfree(call);
	return err;
}

static void farlane_segment_vm_open(struct vm_area_struct *vma)
{
	struct farlane_context *ctx = vma->vm_file->private_data;
	struct farlane_region *region = vma->vm_private_data;

	mutex_lock(&ctx->lock);
	region->maps++;
	mutex_unlock(&ctx->lock);
}

static void farlane_segment_vm_close(struct vm_area_struct *vma)
{
	struct farlane_context *ctx = vma->vm_file->private_data;
	struct farlane_region *region = vma->vm_private_data;

	mutex_lock(&ctx->lock);
	region->maps--;
	mutex_unlock(&ctx->lock);
}

static int farlane_segment_may_split(struct vm_area_struct *vma,
				     unsigned long addr)
{
	return -EINVAL;
}

static const struct vm_operations_struct farlane_segment_vm_ops = {
	.open = farlane_segment_vm_open,
	.close = farlane_segment_vm_close,
	.may_split = farlane_segment_may_split,
};

int farlane_segment_mmap(struct farlane_context *ctx,
			 struct vm_area_struct *vma)
{
	u64 offset = (u64)vma->vm_pgoff << PAGE_SHIFT;
	u64 id = offset >> FARLANE_SEGMENT_SHIFT;
	struct farlane_region *region;
	unsigned long left;
	int err = 0;

	if (offset & ((1ULL << FARLANE_SEGMENT_SHIFT) - 1) ||
	    id >= ctx->fl->max_regions)
		return -EINVAL;
	mutex_lock(&ctx->lock);
	region = xa_load(&ctx->regions, id);
	if (!region || region->state != FARLANE_REGION_LIVE ||
	    region->kind != FARLANE_KIND_SEGMENT)
		err = -ENOENT;
	else if (vma->vm_end - vma->vm_start != region->length)
		err = -EINVAL;
	else
		region->maps++;
	mutex_unlock(&ctx->lock);
	if (err)
		return err;

	left = region->npages;
	err = vm_insert_pages(vma, vma->vm_start, region->pages, &left);
	if (err) {
		mutex_lock(&ctx->lock);
		region->maps--;
		mutex_unlock(&ctx->lock);
		return err;
	}
	vma->vm_private_data = region;
	vma->vm_ops = &farlane_segment_vm_ops;
	return 0;
}

/*
 * The device has been reset: pinned pages go at once. Segments stay, they are mapped and hold the
 * word that tells of the death. A BUSY region belongs to an ioctl, which is about to do the same.
 */
void farlane_memory_quiesced(struct farlane_context *ctx)
{
	struct farlane_region *region;
	unsigned long id;

	mutex_lock(&ctx->lock);
	xa_for_each(&ctx->regions, id, region) {
		if (region->state != FARLANE_REGION_LIVE ||
		    region->kind != FARLANE_KIND_PIN)
			continue;
		xa_erase(&ctx->regions, id);
		farlane_region_free(ctx, region);
	}
	mutex_unlock(&ctx->lock);
}

/*
 * The next one from @id on that keeps watch over device memory, which nobody else knows any more;
 * NULL if none.
 */
static struct farlane_region *farlane_region_pop(struct farlane_context *ctx,
						 unsigned long *id)
{
	struct farlane_region *region;

	/* farlane_memory_quiesced() frees others meanwhile. */
	mutex_lock(&ctx->lock);
	region = xa_find(&ctx->regions, id, ULONG_MAX, XA_PRESENT);
	while (region && !region->device)
		region = xa_find_after(&ctx->regions, id, ULONG_MAX, XA_PRESENT);
	if (region)
		xa_erase(&ctx->regions, *id);
	mutex_unlock(&ctx->lock);
	return region;
}

/*
 * The backend has closed the context, and its id is still taken. What keeps watch over device
 * memory goes now: it must not speak of this id when another context has it.
 */
void farlane_memory_closed(struct farlane_context *ctx)
{
	struct farlane_region *region;
	unsigned long id = 0;

	while ((region = farlane_region_pop(ctx, &id)))
		farlane_region_free(ctx, region);
}

/* The context is closed and nobody else knows it. */
void farlane_memory_release(struct farlane_context *ctx)
{
	struct farlane_region *region;
	unsigned long id;

	xa_for_each(&ctx->regions, id, region)
		farlane_region_free(ctx, region);
	xa_destroy(&ctx->regions);
}
