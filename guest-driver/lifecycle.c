// SPDX-License-Identifier: GPL-2.0
/* How a device is found dead, and what happens then. */
#include <linux/pci.h>
#include <linux/scatterlist.h>

#include "farlane.h"

#define TICK HZ

/*
 * A request that was there at so many ticks in a row will not be answered: three to four seconds.
 * Ticks are counted, not time, so that a paused VM does not find its backend dead.
 */
#define DEAD_TICKS 4

/* Under control_lock. */
static void farlane_ping(struct farlane *fl)
{
	struct farlane_call *ping = &fl->ping;
	struct scatterlist request, reply, *sgs[] = { &request, &reply };

	memset(&ping->request, 0, sizeof(ping->request));
	ping->request.op = cpu_to_le32(FARLANE_OP_PING);
	ping->ticks = 1;
	init_completion(&ping->done);
	sg_init_one(&request, &ping->request, sizeof(ping->request));
	sg_init_one(&reply, &ping->reply, sizeof(ping->reply));
	if (virtqueue_add_sgs(fl->control_vq, sgs, 1, 1, ping, GFP_ATOMIC))
		return;
	list_add_tail(&ping->link, &fl->calls);
	virtqueue_kick(fl->control_vq);
}

void farlane_watchdog(struct work_struct *work)
{
	struct farlane *fl = container_of(to_delayed_work(work), struct farlane,
					  watchdog);
	struct farlane_call *call;
	const char *why = NULL;

	mutex_lock(&fl->contexts_lock);
	if (list_empty(&fl->contexts) || fl->dead) {
		mutex_unlock(&fl->contexts_lock);
		return;
	}
	queue_delayed_work(farlane_wq, &fl->watchdog, TICK);
	mutex_unlock(&fl->contexts_lock);

	spin_lock_irq(&fl->control_lock);
	if (!fl->dead) {
		list_for_each_entry(call, &fl->calls, link)
			if (++call->ticks >= DEAD_TICKS)
				why = "the backend does not answer";
		if (virtqueue_is_broken(fl->control_vq) ||
		    virtqueue_is_broken(fl->event_vq))
			why = "a queue is broken";
		if (fl->condemned)
			why = fl->condemned;
		if (!why && list_empty(&fl->calls))
			farlane_ping(fl);
	}
	spin_unlock_irq(&fl->control_lock);

	if (why) {
		farlane_kill(fl, why);
		farlane_quiesce(fl);
	}
}

/**
 * farlane_kill - declare the device dead and tell everyone
 * @fl: device
 * @why: reason for the log, NULL when it is nothing unusual
 *
 * No request is sent after this. Requests in flight stay there until farlane_quiesce(), which the
 * caller calls next.
 */
void farlane_kill(struct farlane *fl, const char *why)
{
	struct farlane_context *ctx;
	bool was;

	spin_lock_irq(&fl->control_lock);
	was = fl->dead;
	WRITE_ONCE(fl->dead, true);
	spin_unlock_irq(&fl->control_lock);
	if (was)
		return;
	if (why)
		dev_err(&fl->dev, "device is dead: %s\n", why);

	/*
	 * Each context that is not in the list yet will see dead when it gets there, since it takes
	 * the lock after we did.
	 */
	mutex_lock(&fl->contexts_lock);
	list_for_each_entry(ctx, &fl->contexts, link)
		farlane_context_dead(ctx);
	mutex_unlock(&fl->contexts_lock);
}

/**
 * farlane_condemn - have a device killed, and wait until it touches no memory any more
 * @fl: device, with a context that is open
 * @why: reason for the log
 *
 * For those who hold locks that farlane_kill() and farlane_quiesce() must not wait for.
 */
void farlane_condemn(struct farlane *fl, const char *why)
{
	spin_lock_irq(&fl->control_lock);
	fl->condemned = why;
	spin_unlock_irq(&fl->control_lock);
	/* The watchdog looks at it within a second. */
	wait_for_completion(&fl->quiesced);
}

/* A reset of a PCI function that is not there any more would wait for ever. */
static bool farlane_present(struct farlane *fl)
{
	struct device *parent = fl->vdev->dev.parent;

	return !parent || !dev_is_pci(parent) ||
	       pci_device_is_present(to_pci_dev(parent));
}

/**
 * farlane_drain - wait until no disk uses device memory that a device knows
 * @fl: device whose driver is unbound
 *
 * A reset waits for the disks that still use some, and the whole VM with it. Here the unbinding
 * alone waits, as a process does that unmaps its memory; the watchdog still finds a backend dead
 * that does not answer.
 *
 * No context is closed: their processes live, and are not told before the device is dead. Until
 * then, and until the backend has been reset, they have receipts for what has moved, and the backend
 * refuses what it finds in their phony pages instead of taking it for data.
 */
void farlane_drain(struct farlane *fl)
{
	WRITE_ONCE(fl->going, true);
	if (farlane_present(fl))
		farlane_device_memory_revoke_all(fl);
}

/**
 * farlane_quiesce - reset a dead device and take back all memory that it could reach
 * @fl: device, dead
 *
 * After this the device does nothing. Idempotent.
 */
void farlane_quiesce(struct farlane *fl)
{
	struct farlane_call *call, *next;
	struct farlane_context *ctx;
	LIST_HEAD(calls);

	mutex_lock(&fl->reset_lock);
	if (completion_done(&fl->quiesced))
		goto unlock;

	if (farlane_present(fl))
		virtio_reset_device(fl->vdev);

	spin_lock_irq(&fl->control_lock);
	while (virtqueue_detach_unused_buf(fl->control_vq))
		;
	list_splice_init(&fl->calls, &calls);
	/* A call may be gone as soon as it is complete. */
	list_for_each_entry_safe(call, next, &calls, link) {
		list_del_init(&call->link);
		call->err = -ENODEV;
		complete(&call->done);
	}
	spin_unlock_irq(&fl->control_lock);

	spin_lock_irq(&fl->event_lock);
	while (virtqueue_detach_unused_buf(fl->event_vq))
		;
	spin_unlock_irq(&fl->event_lock);
	complete_all(&fl->quiesced);

	farlane_window_quiesced(fl);
	mutex_lock(&fl->contexts_lock);
	list_for_each_entry(ctx, &fl->contexts, link)
		farlane_memory_quiesced(ctx);
	mutex_unlock(&fl->contexts_lock);
unlock:
	mutex_unlock(&fl->reset_lock);
}
