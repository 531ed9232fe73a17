// SPDX-License-Identifier: GPL-2.0
/* One open file of /dev/farlaneN is one context of the backend. */
#include <linux/compat.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "farlane.h"
#include "farlane_verbs_abi.h"

/* Takes the lowest free id and starts the watchdog with the first context. */
static int farlane_context_add(struct farlane_context *ctx)
{
	struct farlane *fl = ctx->fl;
	u32 id;
	int err = -ENODEV;

	mutex_lock(&fl->contexts_lock);
	if (READ_ONCE(fl->dead))
		goto unlock;
	err = -EBUSY;
	for (id = 0; id < fl->max_contexts; id++)
		if (!fl->table[id])
			break;
	if (id == fl->max_contexts)
		goto unlock;
	err = 0;
	ctx->id = id;
	spin_lock_irq(&fl->event_lock);
	fl->table[id] = ctx;
	spin_unlock_irq(&fl->event_lock);
	list_add_tail(&ctx->link, &fl->contexts);
	queue_delayed_work(farlane_wq, &fl->watchdog, HZ);
unlock:
	mutex_unlock(&fl->contexts_lock);
	return err;
}

static void farlane_context_del(struct farlane_context *ctx)
{
	struct farlane *fl = ctx->fl;

	mutex_lock(&fl->contexts_lock);
	list_del(&ctx->link);
	spin_lock_irq(&fl->event_lock);
	fl->table[ctx->id] = NULL;
	spin_unlock_irq(&fl->event_lock);
	mutex_unlock(&fl->contexts_lock);
}

void farlane_context_free(struct farlane_context *ctx)
{
	farlane_memory_release(ctx);
	farlane_context_forget_events(ctx);
	if (ctx->scratch)
		__free_page(ctx->scratch);
	if (ctx->mm)
		mmdrop(ctx->mm);
	kfree(ctx);
}

/* Has the backend let go of everything; the id stays taken until it has. */
void farlane_context_close(struct farlane_context *ctx)
{
	struct farlane *fl = ctx->fl;
	int err;

	spin_lock_irq(&fl->control_lock);
	fl->opened--;
	spin_unlock_irq(&fl->control_lock);
	err = farlane_take_away(ctx, &ctx->close_call, FARLANE_OP_CLOSE, 0);
	if (!farlane_let_go(err)) {
		farlane_kill(fl, "the backend refused to close a context");
		farlane_quiesce(fl);
	}
	farlane_memory_closed(ctx);
	farlane_context_del(ctx);
}

struct farlane_context *farlane_context_new(struct farlane *fl)
{
	struct farlane_context *ctx = kzalloc(sizeof(*ctx), GFP_KERNEL_ACCOUNT);

	if (!ctx)
		return NULL;
	ctx->fl = fl;
	mutex_init(&ctx->lock);
	mutex_init(&ctx->segment_lock);
	mutex_init(&ctx->window_lock);
	xa_init_flags(&ctx->regions, XA_FLAGS_ALLOC | XA_FLAGS_ACCOUNT);
	INIT_LIST_HEAD(&ctx->windows);
	init_waitqueue_head(&ctx->wait);
	return ctx;
}

/* Opens a new context at the backend. Frees it on failure. */
int farlane_context_open(struct farlane_context *ctx)
{
	int err;

	err = farlane_context_add(ctx);
	if (err)
		goto free;
	ctx->close_call.request = (struct farlane_request) {
		.op = cpu_to_le32(FARLANE_OP_OPEN),
		.context = cpu_to_le32(ctx->id),
	};
	/* Only the kernel vouches for addresses of memory. */
	if (ctx->client && !ctx->charged)
		ctx->close_call.request.flags = cpu_to_le32(FARLANE_FLAG_KERNEL);
	err = farlane_call(ctx->fl, &ctx->close_call, NULL, 0);
	if (err)
		goto del;
	return 0;

del:
	farlane_context_del(ctx);
free:
	farlane_context_free(ctx);
	return err;
}

static int farlane_open(struct inode *inode, struct file *file)
{
	struct farlane *fl = container_of(inode->i_cdev, struct farlane, cdev);
	struct farlane_context *ctx;
	int err;

	if (!current->mm)
		return -EPERM;
	ctx = farlane_context_new(fl);
	if (!ctx)
		return -ENOMEM;
	ctx->charged = true;
	ctx->mapping = file->f_mapping;
	ctx->mm = current->mm;
	mmgrab(ctx->mm);
	err = farlane_context_open(ctx);
	if (err)
		return err;
	file->private_data = ctx;
	return nonseekable_open(inode, file);
}

static int farlane_release(struct inode *inode, struct file *file)
{
	struct farlane_context *ctx = file->private_data;

	farlane_context_close(ctx);
	farlane_context_free(ctx);
	return 0;
}

static long farlane_ioctl_info(struct farlane_context *ctx, void __user *user)
{
	struct farlane_info info = {
		.version = FARLANE_ABI_VERSION,
		.context = ctx->id,
		.features = ctx->fl->features,
		.window_bytes = ctx->fl->window_bytes,
	};

	memcpy(info.gid, ctx->fl->gid, sizeof(info.gid));
	return copy_to_user(user, &info, sizeof(info)) ? -EFAULT : 0;
}

/* What a process cannot be told of, it does not have. */
static long farlane_tell_region(struct farlane_context *ctx, void __user *user,
				const void *arg, size_t bytes, u32 region)
{
	if (!copy_to_user(user, arg, bytes))
		return 0;
	farlane_detach(ctx, region);
	return -EFAULT;
}

static long farlane_ioctl_segment(struct farlane_context *ctx,
				  void __user *user)
{
	struct farlane_segment arg;
	int err;

	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	err = farlane_segment(ctx, &arg);
	if (err)
		return err;
	return farlane_tell_region(ctx, user, &arg, sizeof(arg), arg.region);
}

static long farlane_ioctl_pin(struct farlane_context *ctx, void __user *user,
			      int (*pin)(struct farlane_context *ctx, struct farlane_pin *arg))
{
	struct farlane_pin arg;
	int err;

	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	err = pin(ctx, &arg);
	if (err)
		return err;
	return farlane_tell_region(ctx, user, &arg, sizeof(arg), arg.region);
}

static long farlane_ioctl_file(struct farlane_context *ctx, void __user *user)
{
	struct farlane_file arg;
	int err;

	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	err = farlane_file(ctx, &arg);
	if (err)
		return err;
	return farlane_tell_region(ctx, user, &arg, sizeof(arg), arg.region);
}

static long farlane_ioctl_detach(struct farlane_context *ctx,
				 void __user *user)
{
	struct farlane_detach arg;

	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	if (arg.reserved)
		return -EINVAL;
	return farlane_detach(ctx, arg.region);
}

static long farlane_ioctl_bind_event(struct farlane_context *ctx,
				     void __user *user)
{
	struct farlane_bind_event arg;

	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	return farlane_bind_event(ctx, arg.index, arg.fd);
}

int farlane_ring_doorbell(struct farlane *fl)
{
	int err = 0;

	/* The queue is deleted a grace period after the death. */
	rcu_read_lock();
	if (READ_ONCE(fl->dead))
		err = -ENODEV;
	else
		virtqueue_notify(fl->doorbell_vq);
	rcu_read_unlock();
	return err;
}

static long farlane_ioctl(struct file *file, unsigned int cmd,
			  unsigned long arg)
{
	struct farlane_context *ctx = file->private_data;
	void __user *user = (void __user *)arg;

	/* A file that another process got by fork or by a socket is of no use to it. */
	if (current->mm != ctx->mm)
		return -EPERM;
	if (READ_ONCE(ctx->fl->dead))
		return -ENODEV;
	switch (cmd) {
	case FARLANE_IOC_INFO:
		return farlane_ioctl_info(ctx, user);
	case FARLANE_IOC_SEGMENT:
		return farlane_ioctl_segment(ctx, user);
	case FARLANE_IOC_PIN:
		return farlane_ioctl_pin(ctx, user, farlane_pin);
	case FARLANE_IOC_PIN_DEVICE:
		return farlane_ioctl_pin(ctx, user, farlane_pin_device);
	case FARLANE_IOC_FILE:
		return farlane_ioctl_file(ctx, user);
	case FARLANE_IOC_DETACH:
		return farlane_ioctl_detach(ctx, user);
	case FARLANE_IOC_BIND_EVENT:
		return farlane_ioctl_bind_event(ctx, user);
	case FARLANE_IOC_DOORBELL:
		return farlane_ring_doorbell(ctx->fl);
	default:
		return -ENOTTY;
	}
}

static int farlane_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct farlane_context *ctx = file->private_data;

	if (current->mm != ctx->mm)
		return -EPERM;
	if (READ_ONCE(ctx->fl->dead))
		return -ENODEV;
	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	if (vma->vm_flags & VM_EXEC)
		return -EACCES;
	/* Not inherited by children, not grown, not in core dumps, not made executable. */
	farlane_vm_flags(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP,
			 VM_MAYEXEC);
	if (vma->vm_pgoff >= FARLANE_WINDOW_MMAP_BASE >> PAGE_SHIFT)
		return farlane_window_mmap(ctx, vma);
	return farlane_segment_mmap(ctx, vma);
}

const struct file_operations farlane_fops = {
	.owner = THIS_MODULE,
	.open = farlane_open,
	.release = farlane_release,
	.read = farlane_event_read,
	.poll = farlane_event_poll,
	.unlocked_ioctl = farlane_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = farlane_mmap,
};
