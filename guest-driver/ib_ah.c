// SPDX-License-Identifier: GPL-2.0
/* Address handles, multicast groups. */
#include "ib.h"

static struct fv_ah *to_fv_ah(struct ib_ah *ibah)
{
	return container_of(ibah, struct fv_ah, ib);
}

/*
 * Of the kernel: made and ended where nothing may wait, so that the backend does not know it. Each
 * request says where it goes instead.
 */
int fv_create_ah(struct ib_ah *ibah, struct rdma_ah_init_attr *init, struct ib_udata *udata)
{
	const struct ib_global_route *grh = rdma_ah_read_grh(init->ah_attr);
	struct fv_ah *ah = to_fv_ah(ibah);

	/* RoCE has no other. */
	if (!(rdma_ah_get_ah_flags(init->ah_attr) & IB_AH_GRH))
		return -EINVAL;
	ah->handle = 0;
	ah->address = (struct farlane_rxe_addressed) {
		.flow_label = cpu_to_le32(grh->flow_label),
		.sgid_index = grh->sgid_index,
		.hop_limit = grh->hop_limit,
		.traffic_class = grh->traffic_class,
		.sl = rdma_ah_get_sl(init->ah_attr),
	};
	memcpy(ah->address.dgid, grh->dgid.raw, sizeof(ah->address.dgid));
	return 0;
}

int fv_create_user_ah(struct ib_ah *ibah, struct rdma_ah_init_attr *init, struct ib_udata *udata)
{
	const struct ib_global_route *grh = rdma_ah_read_grh(init->ah_attr);
	const struct fv_pd *pd = to_fv_pd(ibah->pd);
	struct farlane_create_ah arg = {
		.pd = cpu_to_le32(pd->handle),
		.flow_label = cpu_to_le32(grh->flow_label),
		.is_global = 1,
		.sgid_index = grh->sgid_index,
		.hop_limit = grh->hop_limit,
		.traffic_class = grh->traffic_class,
		.sl = rdma_ah_get_sl(init->ah_attr),
		.static_rate = rdma_ah_get_static_rate(init->ah_attr),
		.port_num = rdma_ah_get_port_num(init->ah_attr),
	};
	struct rxe_create_ah_resp resp = {};
	struct fv_ah *ah = to_fv_ah(ibah);
	__le32 handle;
	int err;

	/* Requests name it by a number that the provider is told. */
	if (udata->outlen < sizeof(resp) || !(rdma_ah_get_ah_flags(init->ah_attr) & IB_AH_GRH))
		return -EINVAL;
	memcpy(arg.dgid, grh->dgid.raw, sizeof(arg.dgid));
	err = fv_call(pd->ctx, FARLANE_CALL_CREATE_AH, &arg, sizeof(arg), &handle, sizeof(handle));
	if (err)
		return err;
	ah->handle = le32_to_cpu(handle);
	resp.ah_num = ah->handle;
	err = ib_copy_to_udata(udata, &resp, sizeof(resp));
	if (err)
		fv_destroy_call(pd->ctx, FARLANE_CALL_DESTROY_AH, ah->handle);
	return err;
}

int fv_destroy_ah(struct ib_ah *ibah, u32 flags)
{
	const struct fv_pd *pd = to_fv_pd(ibah->pd);
	struct fv_ah *ah = to_fv_ah(ibah);

	if (fv_is_kernel(pd->ctx))
		return 0;
	return fv_destroy_call(pd->ctx, FARLANE_CALL_DESTROY_AH, ah->handle);
}

static int fv_mcast(struct ib_qp *ibqp, const union ib_gid *gid, u32 number)
{
	struct fv_qp *qp = to_fv_qp(ibqp);
	struct farlane_mcast_group arg = { .qp = cpu_to_le32(qp->handle) };

	memcpy(arg.gid, gid->raw, sizeof(arg.gid));
	return fv_call(qp->ctx, number, &arg, sizeof(arg), NULL, 0);
}

int fv_attach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	return fv_mcast(ibqp, gid, FARLANE_CALL_ATTACH_MCAST);
}

int fv_detach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	return fv_mcast(ibqp, gid, FARLANE_CALL_DETACH_MCAST);
}
