// SPDX-License-Identifier: GPL-2.0
/*
 * farlane_ib: the RDMA device of a Farlane device, for the RDMA core. To user space it is as rxe is
 * (rdma_user_rxe.h), whose provider every distribution has; it is not rxe.
 */
#include <linux/etherdevice.h>
#include <linux/module.h>
#include <linux/namei.h>
#include <linux/path.h>
#include <linux/slab.h>
#include <net/addrconf.h>
#include <rdma/ib_marshall.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_netlink.h>

#include "ib.h"

/* Of fv_devices, and of who of them is registered with what driver_id. */
static DEFINE_MUTEX(fv_lock);
static LIST_HEAD(fv_devices);

struct workqueue_struct *fv_wq;

/*
 * Who has RDMA_DRIVER_RXE. The provider finds devices by that number, and ib_uverbs has a copy of
 * it for each device. But rdma_rxe takes every device away that has it when it is unloaded. So ours
 * have another number while rdma_rxe is loaded; by then ib_uverbs has copied the right one, and the
 * provider finds a device by its name, which begins with "rxe".
 */
static bool fv_rxe_is_loaded;
static bool fv_rxe_was_told;	/* by the module loader, which knows better than sysfs */

/* How long a user in the kernel may hold what it has of a device that was unregistered. */
#define UNUSED_SECONDS 10

static int fv_alloc_ucontext(struct ib_ucontext *ibuc, struct ib_udata *udata)
{
	struct fv_ucontext *uc = container_of(ibuc, struct fv_ucontext, ib);

	return fv_context_open(&uc->ctx, to_fv(ibuc->device), true);
}

static void fv_dealloc_ucontext(struct ib_ucontext *ibuc)
{
	fv_context_close(&container_of(ibuc, struct fv_ucontext, ib)->ctx);
}

/* Nothing of the device is mapped, only memory of this module: that may stay. */
static void fv_disassociate_ucontext(struct ib_ucontext *ibuc)
{
}

/* Before any client sees the device, which is so after a move to another net namespace, too. */
static int fv_enable(struct ib_device *ib)
{
	ib->ops.driver_id = RDMA_DRIVER_RXE;
	return 0;
}

static const struct ib_device_ops fv_ops = {
	.owner = THIS_MODULE,
	.driver_id = RDMA_DRIVER_RXE,
	.uverbs_abi_ver = FV_USER_ABI_VERSION,

	.add_gid = fv_add_gid,
	.alloc_mr = fv_alloc_mr,
	.alloc_mw = fv_alloc_mw,
	.alloc_pd = fv_alloc_pd,
	.alloc_ucontext = fv_alloc_ucontext,
	.attach_mcast = fv_attach_mcast,
	.create_ah = fv_create_ah,
	.create_qp = fv_create_qp,
	.create_srq = fv_create_srq,
	.create_user_ah = fv_create_user_ah,
	.dealloc_mw = fv_dealloc_mw,
	.dealloc_pd = fv_dealloc_pd,
	.dealloc_ucontext = fv_dealloc_ucontext,
	.del_gid = fv_del_gid,
	.dereg_mr = fv_dereg_mr,
	.destroy_ah = fv_destroy_ah,
	.destroy_cq = fv_destroy_cq,
	.destroy_qp = fv_destroy_qp,
	.destroy_srq = fv_destroy_srq,
	.detach_mcast = fv_detach_mcast,
	.disassociate_ucontext = fv_disassociate_ucontext,
	.enable_driver = fv_enable,
	.get_dev_fw_str = fv_fw_str,
	.get_dma_mr = fv_get_dma_mr,
	.get_link_layer = fv_link_layer,
	/* Not ib_device_set_netdev(): rdma_rxe looks for its devices among those. */
	.get_netdev = fv_get_netdev,
	.get_port_immutable = fv_port_immutable,
	.map_mr_sg = fv_map_mr_sg,
	.mmap = fv_mmap,
	.mmap_free = fv_mmap_free,
	.modify_qp = fv_modify_qp,
	.modify_srq = fv_modify_srq,
	.poll_cq = fv_poll_cq,
	.post_recv = fv_post_recv,
	.post_send = fv_post_send,
	.post_srq_recv = fv_post_srq_recv,
	.query_device = fv_query_device,
	.query_pkey = fv_query_pkey,
	.query_port = fv_query_port,
	.query_qp = fv_query_qp,
	.query_srq = fv_query_srq,
	.reg_user_mr = fv_reg_user_mr,
	.req_notify_cq = fv_req_notify_cq,
	.rereg_user_mr = fv_rereg_user_mr,
	FV_CQ_OPS,

	INIT_RDMA_OBJ_SIZE(ib_ah, fv_ah, ib),
	INIT_RDMA_OBJ_SIZE(ib_cq, fv_cq, ib),
	INIT_RDMA_OBJ_SIZE(ib_mw, fv_mw, ib),
	INIT_RDMA_OBJ_SIZE(ib_pd, fv_pd, ib),
	INIT_RDMA_OBJ_SIZE(ib_qp, fv_qp, ib),
	INIT_RDMA_OBJ_SIZE(ib_srq, fv_srq, ib),
	INIT_RDMA_OBJ_SIZE(ib_ucontext, fv_ucontext, ib),
};

/*
 * The device is dead: the kernel's requests end when it touches no memory any more, and whoever
 * listens is told, once.
 */
static void fv_death(struct work_struct *work)
{
	struct fv_device *dev = container_of(work, struct fv_device, death);
	struct ib_event event = {
		.device = &dev->ib,
		.element.port_num = 1,
		.event = IB_EVENT_DEVICE_FATAL,
	};

	farlane_client_wait_reset(dev->fl);
	fv_context_over(&dev->kernel);
	/* Not before: nobody waits under this lock for what is ended above. */
	mutex_lock(&fv_lock);
	if (dev->registered)
		ib_dispatch_event(&event);
	mutex_unlock(&fv_lock);
}

/* What the backend says of itself. */
static int fv_query(struct fv_device *dev)
{
	__le32 port = cpu_to_le32(1);
	int err;

	err = fv_call(&dev->kernel, FARLANE_CALL_QUERY_DEVICE, NULL, 0, &dev->attr,
		      sizeof(dev->attr));
	if (!err)
		err = fv_call(&dev->kernel, FARLANE_CALL_DEVICE_LIMITS, NULL, 0, &dev->limits,
			      sizeof(dev->limits));
	if (!err)
		err = fv_call(&dev->kernel, FARLANE_CALL_QUERY_PORT, &port, sizeof(port),
			      &dev->port, sizeof(dev->port));
	return err;
}

/* Under fv_lock. */
static int fv_register(struct fv_device *dev, const char *name, struct net_device *netdev)
{
	struct ib_device *ib = &dev->ib;
	int err;

	/* Nobody would be told of a death that has been; of one that comes it is told. */
	if (farlane_client_is_dead(dev->fl))
		return -ENODEV;
	err = fv_port_start(dev, netdev);
	if (err)
		return err;
	ib_mark_name_assigned_by_user(ib);
	/* Without a device for DMA the addresses of kernel verbs are those of the kernel. */
	err = ib_register_device(ib, name, NULL);
	if (err) {
		fv_port_stop(dev);
		fv_own_netdev_del(dev);
		/* A name that is taken is found out before anything else is done. */
		dev->is_spent = err != -ENFILE;
		return err;
	}
	dev->registered = true;
	fv_port_listened_to(dev);
	return 0;
}

static int fv_init_device(struct fv_device *dev)
{
	struct ib_device *ib = &dev->ib;
	int err;

	err = fv_context_open(&dev->kernel, dev, false);
	if (err)
		return err;
	err = farlane_client_all_memory(dev->kernel.core, &dev->all_memory);
	if (!err)
		err = fv_query(dev);
	if (err) {
		fv_context_close(&dev->kernel);
		return err;
	}
	strscpy(ib->node_desc, "farlane", sizeof(ib->node_desc));
	memcpy(&ib->node_guid, dev->attr.node_guid, sizeof(ib->node_guid));
	ib->node_type = RDMA_NODE_IB_CA;
	ib->phys_port_cnt = 1;
	ib->num_comp_vectors = max(le32_to_cpu(dev->limits.comp_vectors), 1U);
	ib->local_dma_lkey = 0;
	ib->dev.parent = dev->function;
	/* The doorbell of the provider, and how it asks for events. */
	ib->uverbs_cmd_mask |= BIT_ULL(IB_USER_VERBS_CMD_POST_SEND) |
			       BIT_ULL(IB_USER_VERBS_CMD_REQ_NOTIFY_CQ);
	ib_set_device_ops(ib, &fv_ops);
	fv_stats_init(dev);
	return 0;
}

static int fv_probe(struct auxiliary_device *adev, const struct auxiliary_device_id *id)
{
	struct farlane_verbs *verbs = container_of(adev, struct farlane_verbs, adev);
	struct device *vdev = adev->dev.parent;
	struct fv_device *dev;
	int err;

	if (verbs->max_events <= FARLANE_EVENT_FIRST_CHANNEL)
		return -EPROTO;
	dev = ib_alloc_device(fv_device, ib);
	if (!dev)
		return -ENOMEM;
	dev->fl = verbs->fl;
	dev->function = vdev->parent;
	dev->max_events = verbs->max_events;
	dev->max_regions = verbs->max_regions;
	ether_addr_copy(dev->mac, verbs->mac);
	spin_lock_init(&dev->netdev_lock);
	INIT_WORK(&dev->death, fv_death);
	err = fv_init_device(dev);
	if (err)
		goto dealloc;

	mutex_lock(&fv_lock);
	/* Without a MAC it waits for somebody to name the interface. */
	if (!is_zero_ether_addr(dev->mac))
		err = fv_register(dev, "rxe_farlane%d", NULL);
	if (!err)
		list_add_tail(&dev->link, &fv_devices);
	mutex_unlock(&fv_lock);
	if (err)
		goto close;
	auxiliary_set_drvdata(adev, dev);
	return 0;

close:
	fv_context_close(&dev->kernel);
dealloc:
	ib_dealloc_device(&dev->ib);
	dev_err(&adev->dev, "no RDMA device: %d\n", err);
	return err;
}

/*
 * The kernel's users of a device are to have ended what they have of it before it is unregistered.
 * RDS ends it soon after (rds_ib_dev_free() is work of its own): the context and the code of this
 * module stay until then. The protection domain is the last that goes.
 */
static void fv_wait_unused(struct fv_device *dev)
{
	atomic_t *pds = &dev->kernel.pds;

	if (!wait_var_event_timeout(pds, !atomic_read(pds), UNUSED_SECONDS * HZ))
		ibdev_err(&dev->ib, "%d protection domains of the kernel are left\n",
			  atomic_read(pds));
}

static void fv_remove(struct auxiliary_device *adev)
{
	struct fv_device *dev = auxiliary_get_drvdata(adev);
	bool registered;

	mutex_lock(&fv_lock);
	list_del(&dev->link);
	registered = dev->registered;
	dev->registered = false;
	mutex_unlock(&fv_lock);
	if (registered) {
		fv_port_stop(dev);
		/* Ends the contexts of processes, whose objects go one by one. */
		ib_unregister_device(&dev->ib);
		fv_wait_unused(dev);
		fv_own_netdev_del(dev);
	}
	fv_context_close(&dev->kernel);
	ib_dealloc_device(&dev->ib);
}

static const struct auxiliary_device_id fv_ids[] = {
	{ .name = "farlane." FARLANE_VERBS_DEVICE },
	{}
};
MODULE_DEVICE_TABLE(auxiliary, fv_ids);

static struct auxiliary_driver fv_driver = {
	.name = "ib",
	.probe = fv_probe,
	.remove = fv_remove,
	.id_table = fv_ids,
};

/*
 * `rdma link add NAME type farlane netdev IF`: for a device that has no MAC. One whose registration
 * has failed half way cannot be registered again.
 */
static int fv_newlink(const char *name, struct net_device *netdev)
{
	struct fv_device *dev;
	int err = -ENODEV;

	mutex_lock(&fv_lock);
	list_for_each_entry(dev, &fv_devices, link) {
		if (dev->registered || dev->is_spent)
			continue;
		err = fv_register(dev, name, netdev);
		break;
	}
	mutex_unlock(&fv_lock);
	return err;
}

static struct rdma_link_ops fv_link_ops = {
	.type = "farlane",
	.newlink = fv_newlink,
};

/* Comes after ib_uverbs, which has its copy of the number by then. */
static int fv_client_add(struct ib_device *ib)
{
	if (ib->ops.owner == THIS_MODULE && READ_ONCE(fv_rxe_is_loaded))
		ib->ops.driver_id = RDMA_DRIVER_UNKNOWN;
	return 0;
}

static void fv_client_remove(struct ib_device *ib, void *data)
{
}

/*
 * What keeps ib_uverbs loaded, and so before this module: all else that is used here is of ib_core,
 * or may be.
 */
static void *fv_uverbs __used = ib_copy_ah_attr_to_user;

static struct ib_client fv_client = {
	.name = "farlane_ib",
	.add = fv_client_add,
	.remove = fv_client_remove,
	.no_kverbs_req = true,
};

/*
 * rdma_rxe comes before its init and goes after its exit: it never meets the number. That it is
 * there now is told, too, of one that came before anybody listened.
 */
static int fv_module_event(struct notifier_block *nb, unsigned long event, void *data)
{
	struct module *module = data;
	struct fv_device *dev;
	bool comes = event != MODULE_STATE_GOING;

	if (strcmp(module->name, "rdma_rxe"))
		return NOTIFY_DONE;
	mutex_lock(&fv_lock);
	fv_rxe_was_told = true;
	WRITE_ONCE(fv_rxe_is_loaded, comes);
	list_for_each_entry(dev, &fv_devices, link)
		if (dev->registered)
			WRITE_ONCE(dev->ib.ops.driver_id,
				   comes ? RDMA_DRIVER_UNKNOWN : RDMA_DRIVER_RXE);
	mutex_unlock(&fv_lock);
	return NOTIFY_OK;
}

static struct notifier_block fv_module_events = { .notifier_call = fv_module_event };

static int __init fv_init(void)
{
	struct path path;
	int err;

	err = register_module_notifier(&fv_module_events);
	if (err)
		return err;
	/*
	 * find_module() is for the kernel itself. A module has its folder before it is said to be
	 * there, and until it is said to go.
	 */
	mutex_lock(&fv_lock);
	if (!fv_rxe_was_told && !kern_path("/sys/module/rdma_rxe", 0, &path)) {
		path_put(&path);
		WRITE_ONCE(fv_rxe_is_loaded, true);
	}
	mutex_unlock(&fv_lock);
	err = -ENOMEM;
	fv_wq = alloc_workqueue("farlane_ib", WQ_MEM_RECLAIM | WQ_UNBOUND, 0);
	if (!fv_wq)
		goto notifier;
	err = ib_register_client(&fv_client);
	if (err)
		goto workqueue;
	err = auxiliary_driver_register(&fv_driver);
	if (err)
		goto client;
	rdma_link_register(&fv_link_ops);
	return 0;

client:
	ib_unregister_client(&fv_client);
workqueue:
	destroy_workqueue(fv_wq);
notifier:
	unregister_module_notifier(&fv_module_events);
	return err;
}
module_init(fv_init);

static void __exit fv_exit(void)
{
	rdma_link_unregister(&fv_link_ops);
	auxiliary_driver_unregister(&fv_driver);
	ib_unregister_client(&fv_client);
	destroy_workqueue(fv_wq);
	unregister_module_notifier(&fv_module_events);
}
module_exit(fv_exit);

MODULE_ALIAS_RDMA_LINK("farlane");
MODULE_DESCRIPTION("RDMA of a Farlane device, for the RDMA core");
MODULE_AUTHOR("Farlane contributors");
MODULE_LICENSE("GPL");
