// SPDX-License-Identifier: GPL-2.0
/*
 * Farlane: devices that are somewhere else.
 *
 * A virtio driver that does what only a kernel can do for the guest libraries: it vouches for
 * processes and their memory. One open file of /dev/farlaneN is one context of the backend.
 */
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/random.h>
#include <linux/slab.h>

#include "farlane.h"

#define MINORS 256

struct workqueue_struct *farlane_wq;
static struct class *farlane_class;
static dev_t farlane_devt;
static DEFINE_IDA(farlane_minors);

static void farlane_free(struct device *dev)
{
	struct farlane *fl = container_of(dev, struct farlane, dev);

	kfree(fl->event_buffers);
	kvfree(fl->table);
	kfree(fl);
}

/*
 * Each read of the configuration space asks the backend, so it is read once, in the largest pieces
 * that the transport takes.
 */
static int farlane_read_config(struct farlane *fl, u64 *window_bytes)
{
	struct virtio_device *vdev = fl->vdev;
	struct farlane_config config;

	__virtio_cread_many(vdev, 0, &config, sizeof(config) / sizeof(u64),
			    sizeof(u64));
	if (le32_to_cpu(config.magic) != FARLANE_MAGIC) {
		dev_err(&vdev->dev, "not a farlane device: magic 0x%08x\n",
			le32_to_cpu(config.magic));
		return -ENODEV;
	}
	if (le32_to_cpu(config.version) != FARLANE_ABI_VERSION) {
		dev_err(&vdev->dev,
			"the device speaks version %u, this driver version %u\n",
			le32_to_cpu(config.version), FARLANE_ABI_VERSION);
		return -EPROTO;
	}
	fl->features = le32_to_cpu(config.features);
	fl->max_contexts = le32_to_cpu(config.max_contexts);
	fl->max_regions = le32_to_cpu(config.max_regions);
	fl->max_events = le32_to_cpu(config.max_events);
	memcpy(fl->gid, config.gid, sizeof(fl->gid));
	memcpy(fl->mac, config.mac, sizeof(fl->mac));
	fl->generation = le64_to_cpu(config.generation);
	*window_bytes = le64_to_cpu(config.window_bytes);
	if (!fl->max_contexts || fl->max_contexts > FARLANE_MAX_CONTEXTS ||
	    !fl->max_regions || fl->max_regions > FARLANE_MAX_REGIONS ||
	    !fl->max_events || fl->max_events > FARLANE_MAX_EVENTS) {
		dev_err(&vdev->dev,
			"limits out of range: %u contexts, %u regions, %u events\n",
			fl->max_contexts, fl->max_regions, fl->max_events);
		return -EPROTO;
	}
	return 0;
}

static int farlane_init_queues(struct farlane *fl)
{
	struct virtqueue_info info[FARLANE_QUEUES] = {
		[FARLANE_QUEUE_CONTROL] = { "control", farlane_control_done },
		[FARLANE_QUEUE_EVENT] = { "event", farlane_event_done },
		[FARLANE_QUEUE_DOORBELL] = { "doorbell", NULL },
	};
	struct virtqueue *vqs[FARLANE_QUEUES];
	unsigned int slots;
	int err;

	err = farlane_find_vqs(fl->vdev, FARLANE_QUEUES, vqs, info);
	if (err)
		return err;
	fl->control_vq = vqs[FARLANE_QUEUE_CONTROL];
	fl->event_vq = vqs[FARLANE_QUEUE_EVENT];
	fl->doorbell_vq = vqs[FARLANE_QUEUE_DOORBELL];

	/* A request takes up to three descriptors; the watchdog's ping is one more. */
	slots = virtqueue_get_vring_size(fl->control_vq) / 3;
	if (slots < 2) {
		dev_err(&fl->vdev->dev, "control queue is too small\n");
		fl->vdev->config->del_vqs(fl->vdev);
		return -EINVAL;
	}
	sema_init(&fl->slots, slots - 1);
	return 0;
}

static struct farlane *farlane_new(struct virtio_device *vdev)
{
	struct farlane *fl = kzalloc(sizeof(*fl), GFP_KERNEL);

	if (!fl)
		return NULL;
	fl->vdev = vdev;
	fl->minor = -1;
	spin_lock_init(&fl->control_lock);
	spin_lock_init(&fl->event_lock);
	INIT_LIST_HEAD(&fl->calls);
	INIT_LIST_HEAD(&fl->contexts);
	INIT_DELAYED_WORK(&fl->watchdog, farlane_watchdog);
	INIT_WORK(&fl->event_work, farlane_event_work);
	mutex_init(&fl->reset_lock);
	mutex_init(&fl->contexts_lock);
	init_rwsem(&fl->window_sem);
	init_completion(&fl->quiesced);
	device_initialize(&fl->dev);
	fl->dev.class = farlane_class;
	fl->dev.parent = &vdev->dev;
	fl->dev.release = farlane_free;
	cdev_init(&fl->cdev, &farlane_fops);
	fl->cdev.owner = THIS_MODULE;
	return fl;
}

static int farlane_add_node(struct farlane *fl)
{
	int err;

	fl->minor = ida_alloc_max(&farlane_minors, MINORS - 1, GFP_KERNEL);
	if (fl->minor < 0)
		return fl->minor;
	fl->dev.devt = MKDEV(MAJOR(farlane_devt), fl->minor);
	err = dev_set_name(&fl->dev, "farlane%d", fl->minor);
	if (!err)
		err = cdev_device_add(&fl->cdev, &fl->dev);
	if (err)
		ida_free(&farlane_minors, fl->minor);
	return err;
}

static int farlane_probe(struct virtio_device *vdev)
{
	struct farlane *fl;
	u64 window_bytes;
	int err;

	fl = farlane_new(vdev);
	if (!fl)
		return -ENOMEM;
	vdev->priv = fl;
	fl->file_secret = get_random_u64();
	err = farlane_read_config(fl, &window_bytes);
	if (err)
		goto put;
	err = -ENOMEM;
	fl->table = kvcalloc(fl->max_contexts, sizeof(*fl->table), GFP_KERNEL);
	if (!fl->table)
		goto put;
	err = farlane_window_init(fl, window_bytes);
	if (err)
		goto put;
	err = farlane_init_queues(fl);
	if (err)
		goto put;
	err = farlane_event_start(fl);
	if (err)
		goto del_vqs;
	virtio_device_ready(vdev);
	virtqueue_kick(fl->event_vq);
	err = farlane_add_node(fl);
	if (err)
		goto reset;
	dev_info(&fl->dev, "%pI6c, %u contexts, window of %llu MiB\n", fl->gid,
		 fl->max_contexts, fl->window_bytes >> 20);
	farlane_verbs_add(fl);
	return 0;

reset:
	farlane_kill(fl, NULL);
	farlane_quiesce(fl);
	cancel_work_sync(&fl->event_work);
del_vqs:
	vdev->config->del_vqs(vdev);
put:
	put_device(&fl->dev);
	return err;
}

/* Hot-unplug, surprise removal, unbind. Open files outlive this. */
static void farlane_remove(struct virtio_device *vdev)
{
	struct farlane *fl = vdev->priv;

	farlane_drain(fl);
	farlane_verbs_del(fl);
	farlane_kill(fl, NULL);
	cdev_device_del(&fl->cdev, &fl->dev);
	ida_free(&farlane_minors, fl->minor);
	cancel_delayed_work_sync(&fl->watchdog);
	farlane_quiesce(fl);
	cancel_work_sync(&fl->event_work);
	/* Doorbells that saw the device alive. */
	synchronize_rcu();
	vdev->config->del_vqs(vdev);
	put_device(&fl->dev);
}

/* Extents are guest-physical addresses, also where queues would go through an IOMMU. */
static int farlane_validate(struct virtio_device *vdev)
{
	__virtio_clear_bit(vdev, VIRTIO_F_ACCESS_PLATFORM);
	return 0;
}

#ifdef CONFIG_PM_SLEEP
static int farlane_freeze(struct virtio_device *vdev)
{
	dev_err(&vdev->dev, "suspend is not supported: the backend's state would be lost\n");
	return -EOPNOTSUPP;
}

static int farlane_restore(struct virtio_device *vdev)
{
	return -EOPNOTSUPP;
}
#endif

static const struct virtio_device_id farlane_ids[] = {
	{ FARLANE_VIRTIO_ID, VIRTIO_DEV_ANY_ID },
	{ 0 },
};
MODULE_DEVICE_TABLE(virtio, farlane_ids);

static struct virtio_driver farlane_driver = {
	.driver.name = "farlane",
	.id_table = farlane_ids,
	.validate = farlane_validate,
	.probe = farlane_probe,
	.remove = farlane_remove,
#ifdef CONFIG_PM_SLEEP
	.freeze = farlane_freeze,
	.restore = farlane_restore,
#endif
};

/* Any user may open it: a process can register only its own memory. */
static char *farlane_devnode(FARLANE_DEVNODE_CONST struct device *dev,
			     umode_t *mode)
{
	if (mode)
		*mode = 0666;
	return NULL;
}

static int __init farlane_init(void)
{
	int err;

	err = alloc_chrdev_region(&farlane_devt, 0, MINORS, "farlane");
	if (err)
		return err;
	farlane_class = farlane_class_create("farlane");
	if (IS_ERR(farlane_class)) {
		err = PTR_ERR(farlane_class);
		goto unregister;
	}
	farlane_class->devnode = farlane_devnode;
	farlane_wq = alloc_workqueue("farlane", WQ_MEM_RECLAIM | WQ_UNBOUND, 0);
	if (!farlane_wq) {
		err = -ENOMEM;
		goto destroy;
	}
	err = farlane_device_memory_init();
	if (err)
		goto workqueue;
	err = register_virtio_driver(&farlane_driver);
	if (err)
		goto exit;
	return 0;

exit:
	farlane_device_memory_exit();
workqueue:
	destroy_workqueue(farlane_wq);
destroy:
	class_destroy(farlane_class);
unregister:
	unregister_chrdev_region(farlane_devt, MINORS);
	return err;
}
module_init(farlane_init);

static void __exit farlane_exit(void)
{
	unregister_virtio_driver(&farlane_driver);
	farlane_device_memory_exit();
	destroy_workqueue(farlane_wq);
	class_destroy(farlane_class);
	unregister_chrdev_region(farlane_devt, MINORS);
	ida_destroy(&farlane_minors);
}
module_exit(farlane_exit);

MODULE_DESCRIPTION("Farlane: devices that are somewhere else");
MODULE_AUTHOR("Farlane contributors");
MODULE_LICENSE("GPL");
