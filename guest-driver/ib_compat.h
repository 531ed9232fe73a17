/* SPDX-License-Identifier: GPL-2.0 */
/* Differences between the kernels that farlane_ib builds for: 6.1 to 7.3. */
#ifndef FARLANE_IB_COMPAT_H
#define FARLANE_IB_COMPAT_H

#include <linux/version.h>
#include <rdma/ib_verbs.h>

/* Steering hints of a registration. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 17, 0)
#define FV_DMAH_PARAMETER struct ib_dmah *dmah,
#define FV_HAS_DMAH(dmah) (dmah)
#else
#define FV_DMAH_PARAMETER
#define FV_HAS_DMAH(dmah) false
#endif

/* How create_cq gets at the memory of the caller. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
#define FV_CQ_ARGUMENT struct uverbs_attr_bundle
#define FV_CQ_UDATA(argument) ((argument) ? &(argument)->driver_udata : NULL)
#else
#define FV_CQ_ARGUMENT struct ib_udata
#define FV_CQ_UDATA(argument) (argument)
#endif

/* Completion queues of processes have methods of their own, beside those of the kernel. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(7, 1, 0)
#define FV_CQE unsigned int
#define FV_CQ_OPS .create_cq = fv_create_cq, .create_user_cq = fv_create_cq, \
	.resize_user_cq = fv_resize_cq
#else
#define FV_CQE int
#define FV_CQ_OPS .create_cq = fv_create_cq, .resize_cq = fv_resize_cq
#endif

/* Since 6.10: udev leaves a name alone that somebody has chosen. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 10, 0)
#define ib_mark_name_assigned_by_user(ib) do { } while (0)
#endif

/* IB_ACCESS_FLUSH_GLOBAL and _PERSISTENT, since 6.3. */
#define FV_ACCESS_FLUSH_GLOBAL BIT(8)
#define FV_ACCESS_FLUSH_PERSISTENT BIT(9)

#endif
