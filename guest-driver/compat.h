/* SPDX-License-Identifier: GPL-2.0 */
/* Differences between the kernels this driver builds for: 6.1 to 7.2. */
#ifndef FARLANE_COMPAT_H
#define FARLANE_COMPAT_H

#include <linux/device/class.h>
#include <linux/eventfd.h>
#include <linux/mm.h>
#include <linux/version.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>

/* Since 6.6. */
#ifndef __counted_by
#define __counted_by(member)
#endif

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 11, 0)
struct virtqueue_info {
	const char *name;
	vq_callback_t *callback;
	bool ctx;
};
#endif

static inline int farlane_find_vqs(struct virtio_device *vdev,
				   unsigned int nvqs, struct virtqueue *vqs[],
				   struct virtqueue_info info[])
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
	return virtio_find_vqs(vdev, nvqs, vqs, info, NULL);
#else
	vq_callback_t *callbacks[8];
	const char *names[8];
	unsigned int i;

	if (nvqs > ARRAY_SIZE(names))
		return -EINVAL;
	for (i = 0; i < nvqs; i++) {
		callbacks[i] = info[i].callback;
		names[i] = info[i].name;
	}
	return virtio_find_vqs(vdev, nvqs, vqs, callbacks, names, NULL);
#endif
}

static inline void farlane_eventfd_signal(struct eventfd_ctx *ctx)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0)
	eventfd_signal(ctx);
#else
	eventfd_signal(ctx, 1);
#endif
}

static inline void farlane_vm_flags(struct vm_area_struct *vma,
				    vm_flags_t set, vm_flags_t clear)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_mod(vma, set, clear);
#else
	vma->vm_flags = (vma->vm_flags | set) & ~clear;
#endif
}

/* The page frame at an address of a mapping without struct pages. Under mmap_lock. */
static inline int farlane_follow_pfn(struct vm_area_struct *vma,
				     unsigned long address, unsigned long *pfn)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)
	struct follow_pfnmap_args args = { .vma = vma, .address = address };
	int err;

	err = follow_pfnmap_start(&args);
	if (err)
		return err;
	*pfn = args.pfn;
	follow_pfnmap_end(&args);
	return 0;
#elif LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0)
	spinlock_t *lock; /* of the page table */
	pte_t *pte;
	int err;

	err = follow_pte(vma, address, &pte, &lock);
	if (err)
		return err;
	*pfn = pte_pfn(ptep_get(pte));
	pte_unmap_unlock(pte, lock);
	return 0;
#else
	return follow_pfn(vma, address, pfn);
#endif
}

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
#define FARLANE_DEVNODE_CONST const
#else
#define FARLANE_DEVNODE_CONST
#endif

static inline struct class *farlane_class_create(const char *name)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 4, 0)
	return class_create(name);
#else
	return class_create(THIS_MODULE, name);
#endif
}

/*
 * Before 6.2 a read-only long-term pin did not break copy-on-write sharing, and the owner's next
 * write went to another page. Asking for a forced write pin is what breaks it there.
 */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
#define FARLANE_GUP_READ_ONLY 0
#else
#define FARLANE_GUP_READ_ONLY (FOLL_WRITE | FOLL_FORCE)
#endif

#endif
