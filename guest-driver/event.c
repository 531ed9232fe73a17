// SPDX-License-Identifier: GPL-2.0
/* Events of the backend, and how they reach processes: read(), poll() and eventfds. */
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "farlane.h"

/* Events that one interrupt handles; the rest is left to a work item. */
#define EVENT_BUDGET 1024

/* Under event_lock. */
static int farlane_event_post(struct farlane *fl, struct farlane_event *buffer)
{
	struct scatterlist sg;

	memset(buffer, 0xff, sizeof(*buffer));
	sg_init_one(&sg, buffer, sizeof(*buffer));
	return virtqueue_add_inbuf(fl->event_vq, &sg, 1, buffer, GFP_ATOMIC);
}

/* Fills the queue. Before the device is ready, so nothing else uses the queue yet. */
int farlane_event_start(struct farlane *fl)
{
	unsigned int size = virtqueue_get_vring_size(fl->event_vq);
	unsigned int i;
	int err;

	fl->event_buffers = kcalloc(size, sizeof(*fl->event_buffers),
				    GFP_KERNEL);
	if (!fl->event_buffers)
		return -ENOMEM;
	for (i = 0; i < size; i++) {
		err = farlane_event_post(fl, &fl->event_buffers[i]);
		if (err)
			return err;
	}
	return 0;
}

/* Under event_lock. */
static void farlane_event(struct farlane *fl, u32 id, u32 index)
{
	struct farlane_context *ctx = NULL;

	if (id < fl->max_contexts)
		ctx = fl->table[id];
	/* An event may cross the close of its context: not worth a word if the id can exist. */
	if (id >= fl->max_contexts || index >= fl->max_events) {
		dev_warn_ratelimited(&fl->dev,
				     "bogus event: context %u index %u\n",
				     id, index);
		return;
	}
	if (!ctx)
		return;
	if (ctx->client) {
		ctx->client->event(ctx->client_data, index);
	} else if (index == FARLANE_EVENT_WAKE) {
		WRITE_ONCE(ctx->wakes, ctx->wakes + 1);
		wake_up_interruptible_poll(&ctx->wait, EPOLLIN | EPOLLRDNORM);
	} else if (ctx->events && ctx->events[index]) {
		farlane_eventfd_signal(ctx->events[index]);
	}
}

static void farlane_event_drain(struct farlane *fl)
{
	struct virtqueue *vq = fl->event_vq;
	struct farlane_event *buffer;
	unsigned int budget = EVENT_BUDGET;
	bool posted = false;
	unsigned long flags;
	unsigned int len;

	spin_lock_irqsave(&fl->event_lock, flags);
	if (READ_ONCE(fl->dead))
		goto unlock;
	do {
		virtqueue_disable_cb(vq);
		while (budget && (buffer = virtqueue_get_buf(vq, &len))) {
			budget--;
			if (len >= sizeof(*buffer))
				farlane_event(fl, le32_to_cpu(buffer->context),
					      le32_to_cpu(buffer->index));
			else
				dev_warn_ratelimited(&fl->dev,
						     "event of %u bytes\n",
						     len);
			if (!farlane_event_post(fl, buffer))
				posted = true;
		}
		if (!budget) {
			queue_work(farlane_wq, &fl->event_work);
			break;
		}
	} while (!virtqueue_is_broken(vq) && !virtqueue_enable_cb(vq));
	if (posted)
		virtqueue_kick(vq);
unlock:
	spin_unlock_irqrestore(&fl->event_lock, flags);
}

void farlane_event_done(struct virtqueue *vq)
{
	farlane_event_drain(vq->vdev->priv);
}

void farlane_event_work(struct work_struct *work)
{
	farlane_event_drain(container_of(work, struct farlane, event_work));
}

int farlane_bind_event(struct farlane_context *ctx, u32 index, int fd)
{
	struct farlane *fl = ctx->fl;
	struct eventfd_ctx **events = NULL, *event = NULL;
	int err = 0;

	if (!index || index >= fl->max_events || fd < -1)
		return -EINVAL;
	if (fd >= 0) {
		event = eventfd_ctx_fdget(fd);
		if (IS_ERR(event))
			return PTR_ERR(event);
		if (!READ_ONCE(ctx->events)) {
			events = kvcalloc(fl->max_events, sizeof(*events),
					  GFP_KERNEL_ACCOUNT);
			if (!events) {
				eventfd_ctx_put(event);
				return -ENOMEM;
			}
		}
	}

	spin_lock_irq(&fl->event_lock);
	if (READ_ONCE(fl->dead)) {
		err = -ENODEV;
	} else {
		if (!ctx->events)
			swap(ctx->events, events);
		if (ctx->events)
			swap(ctx->events[index], event);
	}
	spin_unlock_irq(&fl->event_lock);

	/* The one that was bound before, or the one that could not be bound. */
	if (event)
		eventfd_ctx_put(event);
	kvfree(events);
	return err;
}

/* The first segment of a context holds the word that tells the process of the device's death. */
void farlane_set_header(struct farlane_context *ctx, struct page *page)
{
	struct farlane *fl = ctx->fl;

	spin_lock_irq(&fl->event_lock);
	ctx->dead_word = page_address(page) + FARLANE_OFF_DEAD;
	if (READ_ONCE(fl->dead))
		WRITE_ONCE(*ctx->dead_word, cpu_to_le32(1));
	spin_unlock_irq(&fl->event_lock);
}

/* Tells a context that its device is dead. */
void farlane_context_dead(struct farlane_context *ctx)
{
	struct farlane *fl = ctx->fl;
	u32 i;

	spin_lock_irq(&fl->event_lock);
	if (ctx->dead_word)
		WRITE_ONCE(*ctx->dead_word, cpu_to_le32(1));
	/* Who is woken below must see the word. */
	smp_wmb();
	for (i = 0; ctx->events && i < fl->max_events; i++)
		if (ctx->events[i])
			farlane_eventfd_signal(ctx->events[i]);
	wake_up_poll(&ctx->wait, EPOLLIN | EPOLLRDNORM | EPOLLHUP | EPOLLERR);
	if (ctx->client)
		ctx->client->dead(ctx->client_data);
	spin_unlock_irq(&fl->event_lock);
}

/* The context is in no table any more. */
void farlane_context_forget_events(struct farlane_context *ctx)
{
	u32 i;

	for (i = 0; ctx->events && i < ctx->fl->max_events; i++)
		if (ctx->events[i])
			eventfd_ctx_put(ctx->events[i]);
	kvfree(ctx->events);
}

static int farlane_take_wakes(struct farlane_context *ctx, u64 *wakes)
{
	struct farlane *fl = ctx->fl;
	int err = 0;

	spin_lock_irq(&fl->event_lock);
	*wakes = ctx->wakes;
	if (READ_ONCE(fl->dead))
		err = -ENODEV;
	else if (!*wakes)
		err = -EAGAIN;
	else
		WRITE_ONCE(ctx->wakes, 0);
	spin_unlock_irq(&fl->event_lock);
	return err;
}

ssize_t farlane_event_read(struct file *file, char __user *buf, size_t count,
			   loff_t *pos)
{
	struct farlane_context *ctx = file->private_data;
	struct farlane *fl = ctx->fl;
	u64 wakes;
	int err;

	if (current->mm != ctx->mm)
		return -EPERM;
	if (count < sizeof(wakes))
		return -EINVAL;
	while ((err = farlane_take_wakes(ctx, &wakes)) == -EAGAIN) {
		if (file->f_flags & O_NONBLOCK)
			return err;
		err = wait_event_interruptible(ctx->wait,
					       READ_ONCE(ctx->wakes) ||
					       READ_ONCE(fl->dead));
		if (err)
			return err;
	}
	if (err)
		return err;
	if (copy_to_user(buf, &wakes, sizeof(wakes))) {
		spin_lock_irq(&fl->event_lock);
		WRITE_ONCE(ctx->wakes, ctx->wakes + wakes);
		spin_unlock_irq(&fl->event_lock);
		return -EFAULT;
	}
	return sizeof(wakes);
}

__poll_t farlane_event_poll(struct file *file, poll_table *wait)
{
	struct farlane_context *ctx = file->private_data;

	poll_wait(file, &ctx->wait, wait);
	if (READ_ONCE(ctx->fl->dead))
		return EPOLLIN | EPOLLRDNORM | EPOLLHUP | EPOLLERR;
	if (READ_ONCE(ctx->wakes))
		return EPOLLIN | EPOLLRDNORM;
	return 0;
}
