// SPDX-License-Identifier: GPL-2.0
/* Protection domains, registrations of memory of processes, memory windows. */
#include <linux/slab.h>

#include "ib.h"

/* Rights that the backend knows; those of the optional range it may ignore. */
#define FV_ACCESS (IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE | IB_ACCESS_REMOTE_READ | \
		   IB_ACCESS_REMOTE_ATOMIC | IB_ACCESS_MW_BIND | FV_ACCESS_FLUSH_GLOBAL)

int fv_alloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	struct fv_context *ctx = fv_context_of(ibpd->device, udata);
	struct fv_pd *pd = to_fv_pd(ibpd);
	__le32 handle;
	int err;

	err = fv_call(ctx, FARLANE_CALL_ALLOC_PD, NULL, 0, &handle, sizeof(handle));
	if (err)
		return err;
	pd->ctx = ctx;
	pd->handle = le32_to_cpu(handle);
	if (fv_is_kernel(ctx))
		atomic_inc(&ctx->pds);
	return 0;
}

int fv_dealloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	struct fv_pd *pd = to_fv_pd(ibpd);
	struct fv_context *ctx = pd->ctx;
	int err = fv_destroy_call(ctx, FARLANE_CALL_DEALLOC_PD, pd->handle);

	/* The context may be gone after this: the wake-up goes by its address alone. */
	if (!err && fv_is_kernel(ctx) && atomic_dec_and_test(&ctx->pds))
		wake_up_var(&ctx->pds);
	return err;
}

/* What a registration is to become. */
struct fv_registration {
	struct fv_pd *pd;
	u32 region;
	int access;
	u64 length;
	u64 iova;
};

static void fv_registration_wire(const struct fv_registration *reg, struct farlane_reg_mr *wire)
{
	*wire = (struct farlane_reg_mr) {
		.pd = cpu_to_le32(reg->pd->handle),
		.source = cpu_to_le32(FARLANE_MR_SOURCE_PIN),
		.object = cpu_to_le32(reg->region),
		.access = cpu_to_le32(reg->access),
		.length = cpu_to_le64(reg->length),
		.iova = cpu_to_le64(reg->iova),
	};
}

int fv_check_access(int *access)
{
	*access &= ~IB_ACCESS_OPTIONAL;
	return *access & ~FV_ACCESS ? -EOPNOTSUPP : 0;
}

struct ib_mr *fv_reg_user_mr(struct ib_pd *ibpd, u64 start, u64 length, u64 iova, int access,
			     FV_DMAH_PARAMETER struct ib_udata *udata)
{
	struct fv_pd *pd = to_fv_pd(ibpd);
	struct fv_registration reg = { .pd = pd, .length = length, .iova = iova };
	struct farlane_reg_mr arg;
	struct farlane_mr result;
	struct fv_mr *mr;
	int err;

	if (FV_HAS_DMAH(dmah))
		return ERR_PTR(-EOPNOTSUPP);
	err = fv_check_access(&access);
	if (err)
		return ERR_PTR(err);
	mr = kzalloc(sizeof(*mr), GFP_KERNEL_ACCOUNT);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	mr->ctx = pd->ctx;
	mr->start = start;
	mr->length = length;
	mr->iova = iova;
	mr->access = access;
	mr->has_region = true;
	mr->writable = ib_access_writable(access);
	err = farlane_client_pin(pd->ctx->core, start, length, mr->writable, &mr->region);
	if (err)
		goto free;
	reg.region = mr->region;
	reg.access = access;
	fv_registration_wire(&reg, &arg);
	err = fv_call(pd->ctx, FARLANE_CALL_REG_MR, &arg, sizeof(arg), &result, sizeof(result));
	if (err)
		goto detach;
	mr->handle = le32_to_cpu(result.handle);
	mr->ib.lkey = le32_to_cpu(result.lkey);
	mr->ib.rkey = le32_to_cpu(result.rkey);
	return &mr->ib;

detach:
	farlane_client_detach(pd->ctx->core, mr->region);
free:
	kfree(mr);
	return ERR_PTR(err);
}

/* The handle and the keys stay; with an error everything does. */
struct ib_mr *fv_rereg_user_mr(struct ib_mr *ibmr, int flags, u64 start, u64 length, u64 iova,
			       int access, struct ib_pd *ibpd, struct ib_udata *udata)
{
	struct fv_mr *mr = to_fv_mr(ibmr);
	struct fv_pd *pd = to_fv_pd(flags & IB_MR_REREG_PD ? ibpd : ibmr->pd);
	bool moves = flags & IB_MR_REREG_TRANS;
	struct fv_registration reg = { .pd = pd, .region = mr->region };
	struct farlane_rereg_mr arg = { .mr = cpu_to_le32(mr->handle) };
	bool writable, pinned = false;
	int err;

	if (flags & ~IB_MR_REREG_SUPPORTED)
		return ERR_PTR(-EOPNOTSUPP);
	if (pd->ctx != mr->ctx)
		return ERR_PTR(-EINVAL);
	if (!(flags & IB_MR_REREG_ACCESS))
		access = mr->access;
	err = fv_check_access(&access);
	if (err)
		return ERR_PTR(err);
	if (!moves) {
		start = mr->start;
		length = mr->length;
		iova = mr->iova;
	}
	writable = ib_access_writable(access);
	if (moves || (writable && !mr->writable)) {
		err = farlane_client_pin(mr->ctx->core, start, length, writable, &reg.region);
		if (err)
			return ERR_PTR(err);
		pinned = true;
	}
	reg.access = access;
	reg.length = length;
	reg.iova = iova;
	fv_registration_wire(&reg, &arg.registration);
	err = fv_call(mr->ctx, FARLANE_CALL_REREG_MR, &arg, sizeof(arg), NULL, 0);
	if (err) {
		if (pinned)
			farlane_client_detach(mr->ctx->core, reg.region);
		return ERR_PTR(err);
	}
	if (pinned) {
		farlane_client_detach(mr->ctx->core, mr->region);
		mr->region = reg.region;
		mr->writable = writable;
	}
	mr->start = start;
	mr->length = length;
	mr->iova = iova;
	mr->access = access;
	return NULL;
}

int fv_dereg_mr(struct ib_mr *ibmr, struct ib_udata *udata)
{
	struct fv_mr *mr = to_fv_mr(ibmr);
	int err = fv_destroy_call(mr->ctx, FARLANE_CALL_DEREG_MR, mr->handle);

	/* A memory window that is bound to it. */
	if (err)
		return err;
	if (mr->has_region)
		farlane_client_detach(mr->ctx->core, mr->region);
	kfree(mr);
	return 0;
}

int fv_alloc_mw(struct ib_mw *ibmw, struct ib_udata *udata)
{
	struct fv_mw *mw = container_of(ibmw, struct fv_mw, ib);
	struct fv_pd *pd = to_fv_pd(ibmw->pd);
	struct farlane_alloc_mw arg = {
		.pd = cpu_to_le32(pd->handle),
		.mw_type = cpu_to_le32(ibmw->type),
	};
	struct farlane_mw result;
	int err;

	err = fv_call(pd->ctx, FARLANE_CALL_ALLOC_MW, &arg, sizeof(arg), &result, sizeof(result));
	if (err)
		return err;
	mw->handle = le32_to_cpu(result.handle);
	ibmw->rkey = le32_to_cpu(result.rkey);
	return 0;
}

int fv_dealloc_mw(struct ib_mw *ibmw)
{
	struct fv_mw *mw = container_of(ibmw, struct fv_mw, ib);

	return fv_destroy_call(to_fv_pd(ibmw->pd)->ctx, FARLANE_CALL_DEALLOC_MW, mw->handle);
}
