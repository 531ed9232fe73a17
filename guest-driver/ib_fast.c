// SPDX-License-Identifier: GPL-2.0
/*
 * Registrations of the kernel. Its addresses for DMA are its virtual ones, as the device has none
 * for DMA: those of the direct map, where all memory lies in a row from PAGE_OFFSET on, which is
 * physical address 0. What lies elsewhere (vmalloc, stacks, data of the kernel's image and of
 * modules) the DMA MR does not have, and the request that names it fails.
 */
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "ib.h"

/* Of others PAGE_OFFSET may be another physical address, and a request would reach other memory. */
#ifndef CONFIG_X86_64
#error "The direct map of this architecture is not known to begin at physical address 0"
#endif

/* Addresses of pages fill at most one. */
static_assert(FARLANE_MAX_FAST_PAGES * sizeof(__le64) <= PAGE_SIZE);

static void fv_registered(struct fv_mr *mr, const struct farlane_mr *result)
{
	mr->handle = le32_to_cpu(result->handle);
	mr->ib.lkey = le32_to_cpu(result->lkey);
	mr->ib.rkey = le32_to_cpu(result->rkey);
}

struct ib_mr *fv_get_dma_mr(struct ib_pd *ibpd, int access)
{
	struct fv_pd *pd = to_fv_pd(ibpd);
	struct farlane_reg_mr arg = {
		.pd = cpu_to_le32(pd->handle),
		.source = cpu_to_le32(FARLANE_MR_SOURCE_PIN),
		.object = cpu_to_le32(pd->ctx->dev->all_memory),
		.iova = cpu_to_le64(PAGE_OFFSET),
	};
	struct farlane_mr result;
	struct fv_mr *mr;
	int err;

	if (!fv_is_kernel(pd->ctx))
		return ERR_PTR(-EOPNOTSUPP);
	err = fv_check_access(&access);
	if (err)
		return ERR_PTR(err);
	arg.access = cpu_to_le32(access);
	mr = kzalloc(sizeof(*mr), GFP_KERNEL);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	mr->ctx = pd->ctx;
	err = fv_call(pd->ctx, FARLANE_CALL_REG_MR, &arg, sizeof(arg), &result, sizeof(result));
	if (err) {
		kfree(mr);
		return ERR_PTR(err);
	}
	fv_registered(mr, &result);
	return &mr->ib;
}

/* A registration of pages that requests name, and the list of those. */
struct ib_mr *fv_alloc_mr(struct ib_pd *ibpd, enum ib_mr_type type, u32 max_num_sg)
{
	struct fv_pd *pd = to_fv_pd(ibpd);
	struct farlane_alloc_fast_mr arg = {
		.pd = cpu_to_le32(pd->handle),
		.pages = cpu_to_le32(max_num_sg),
		.page_bytes = cpu_to_le32(PAGE_SIZE),
	};
	struct farlane_shared list;
	struct farlane_mr result;
	struct fv_mr *mr;
	int err;

	if (!fv_is_kernel(pd->ctx) || type != IB_MR_TYPE_MEM_REG)
		return ERR_PTR(-EOPNOTSUPP);
	if (!max_num_sg || max_num_sg > FARLANE_MAX_FAST_PAGES)
		return ERR_PTR(-EINVAL);
	mr = kzalloc(sizeof(*mr), GFP_KERNEL);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	mr->ctx = pd->ctx;
	mr->max_pages = max_num_sg;
	err = farlane_client_segment(pd->ctx->core, PAGE_SIZE, &list);
	if (err)
		goto free;
	mr->region = list.region;
	mr->has_region = true;
	mr->list = page_address(list.pages[0]);
	arg.region = cpu_to_le32(list.region);
	err = fv_call(pd->ctx, FARLANE_CALL_ALLOC_FAST_MR, &arg, sizeof(arg), &result,
		      sizeof(result));
	if (err)
		goto detach;
	fv_registered(mr, &result);
	return &mr->ib;

detach:
	farlane_client_detach(pd->ctx->core, mr->region);
free:
	kfree(mr);
	return ERR_PTR(err);
}

static int fv_set_page(struct ib_mr *ibmr, u64 address)
{
	struct fv_mr *mr = to_fv_mr(ibmr);

	if (mr->pages == mr->max_pages)
		return -ENOMEM;
	if (!virt_addr_valid((void *)(uintptr_t)address))
		return -EINVAL;
	mr->list[mr->pages++] = cpu_to_le64(virt_to_phys((void *)(uintptr_t)address));
	return 0;
}

/*
 * It may still be of other memory: the request that ends that goes before the one that says this.
 * The backend has copied the list then, and looks at it again with the latter alone.
 */
int fv_map_mr_sg(struct ib_mr *ibmr, struct scatterlist *sg, int count, unsigned int *offset)
{
	struct fv_mr *mr = to_fv_mr(ibmr);

	if (!mr->list || ibmr->page_size != PAGE_SIZE)
		return -EINVAL;
	mr->pages = 0;
	return ib_sg_to_pages(ibmr, sg, count, offset, fv_set_page);
}

/* In any context: how a request says what a registration is of from then on. */
int fv_fast_registration(const struct ib_reg_wr *wr, struct farlane_rxe_register *to)
{
	struct fv_mr *mr = to_fv_mr(wr->mr);
	int access = wr->access;
	int err = fv_check_access(&access);

	if (err)
		return err;
	if (!mr->list || !fv_is_kernel(mr->ctx))
		return -EINVAL;
	*to = (struct farlane_rxe_register) {
		.mr = cpu_to_le32(mr->handle),
		.pages = cpu_to_le32(mr->pages),
		.key = cpu_to_le32(wr->key),
		.access = cpu_to_le32(access),
		.iova = cpu_to_le64(mr->ib.iova),
		.length = cpu_to_le64(mr->ib.length),
		.offset = cpu_to_le32(mr->ib.iova & (PAGE_SIZE - 1)),
	};
	return 0;
}
