// SPDX-License-Identifier: GPL-2.0
/*
 * Counters of the port, which `rdma statistic show` and hw_counters in sysfs have: those that the
 * backend keeps of this device.
 */
#include "ib.h"

/* In the order of struct farlane_port_counters. */
#define FV_COUNTER(field) \
	[offsetof(struct farlane_port_counters, field) / sizeof(__le64)] = { .name = #field }

static const struct rdma_stat_desc fv_counters[] = {
	FV_COUNTER(send_wrs),
	FV_COUNTER(send_bytes),
	FV_COUNTER(recv_wrs),
	FV_COUNTER(recv_bytes),
	FV_COUNTER(rdma_write_wrs),
	FV_COUNTER(rdma_write_bytes),
	FV_COUNTER(rdma_write_recv_bytes),
	FV_COUNTER(rdma_read_wrs),
	FV_COUNTER(rdma_read_bytes),
	FV_COUNTER(rdma_read_resp_bytes),
	FV_COUNTER(atomic_wrs),
	FV_COUNTER(local_wrs),
	FV_COUNTER(rx_write_requests),
	FV_COUNTER(rx_read_requests),
	FV_COUNTER(rx_atomic_requests),
	FV_COUNTER(tx_drops),
	FV_COUNTER(out_of_buffer),
	FV_COUNTER(rcvd_rnr_err),
	FV_COUNTER(local_ack_timeout_err),
	FV_COUNTER(retry_exceeded_err),
	FV_COUNTER(retry_rnr_exceeded_err),
	FV_COUNTER(req_cqe_error),
	FV_COUNTER(resp_cqe_error),
	FV_COUNTER(req_cqe_flush_error),
	FV_COUNTER(resp_cqe_flush_error),
};

/* All that the backend has, and nothing else. */
static_assert(ARRAY_SIZE(fv_counters) ==
	      offsetof(struct farlane_port_counters, reserved) / sizeof(__le64));

static int fv_query_counters(struct fv_device *dev, struct farlane_port_counters *counters)
{
	__le32 port = cpu_to_le32(1);

	return fv_call(&dev->kernel, FARLANE_CALL_PORT_COUNTERS, &port, sizeof(port), counters,
		       sizeof(*counters));
}

static struct rdma_hw_stats *fv_alloc_stats(struct ib_device *ib, u32 port)
{
	return rdma_alloc_hw_stats_struct(fv_counters, ARRAY_SIZE(fv_counters),
					  RDMA_HW_STATS_DEFAULT_LIFESPAN);
}

static int fv_get_stats(struct ib_device *ib, struct rdma_hw_stats *stats, u32 port, int index)
{
	struct farlane_port_counters counters;
	const __le64 *values = (const __le64 *)&counters;
	int err, i;

	/* The device has none of its own, beside those of its port. */
	if (!port)
		return -EINVAL;
	err = fv_query_counters(to_fv(ib), &counters);
	if (err)
		return err;
	for (i = 0; i < ARRAY_SIZE(fv_counters); i++)
		stats->value[i] = le64_to_cpu(values[i]);
	return ARRAY_SIZE(fv_counters);
}

static const struct ib_device_ops fv_stats_ops = {
	.alloc_hw_port_stats = fv_alloc_stats,
	.get_hw_stats = fv_get_stats,
};

/**
 * fv_stats_init - has a device, not registered yet, have counters where its backend has
 * @dev: device, whose context is open
 */
void fv_stats_init(struct fv_device *dev)
{
	struct farlane_port_counters counters;

	if (!fv_query_counters(dev, &counters))
		ib_set_device_ops(&dev->ib, &fv_stats_ops);
}
