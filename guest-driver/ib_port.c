// SPDX-License-Identifier: GPL-2.0
/*
 * Attributes of the device and of its port, and the network interface that the port belongs to. The
 * interface says whether the port is up, how long its packets are, and, by its addresses, what the
 * GIDs are. It is that with the MAC of the configuration space.
 */
#include <linux/etherdevice.h>
#include <linux/module.h>
#include <linux/rtnetlink.h>
#include <rdma/ib_addr.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_mad.h>

#include "ib.h"

/* Largest ring of completions in a segment: a power of two less the header, less a free one. */
#define FV_MAX_CQE (FARLANE_MAX_SEGMENT_BYTES / FARLANE_RING_MIN_STRIDE / 2 - 1)
/* The same of work requests of the largest size. */
#define FV_MAX_WR (FARLANE_MAX_SEGMENT_BYTES / FARLANE_RING_MAX_STRIDE / 2 - 1)

/* Bits of enum ib_device_cap_flags that are passed on from the backend. */
#define FV_DEVICE_CAPS (BIT_ULL(13) /* SRQ_RESIZE */ | BIT_ULL(17) /* MEM_WINDOW */ | \
			BIT_ULL(24) /* MEM_WINDOW_TYPE_2B */ | BIT_ULL(38) /* FLUSH_GLOBAL */ | \
			BIT_ULL(40) /* ATOMIC_WRITE */)

/* What the RDMA core has for a GID of no VLAN. */
#define FV_NO_VLAN 0xffff

static bool fv_own_interface;
module_param_named(own_interface, fv_own_interface, bool, 0444);
MODULE_PARM_DESC(own_interface, "make an interface for a device where none has its MAC");

int fv_query_device(struct ib_device *ib, struct ib_device_attr *attr, struct ib_udata *udata)
{
	const struct fv_device *dev = to_fv(ib);
	const struct farlane_device_limits *limits = &dev->limits;
	const struct farlane_device_attr *from = &dev->attr;

	if (udata && (udata->inlen || udata->outlen))
		return -EINVAL;
	memset(attr, 0, sizeof(*attr));
	attr->sys_image_guid = ib->node_guid;
	attr->max_mr_size = le64_to_cpu(from->max_mr_size);
	attr->page_size_cap = PAGE_SIZE;
	attr->vendor_id = le32_to_cpu(from->vendor_id);
	attr->vendor_part_id = le32_to_cpu(from->vendor_part_id);
	attr->hw_ver = le32_to_cpu(from->hw_ver);
	attr->device_cap_flags = FV_DEVICE_CAPS & (le64_to_cpu(from->device_cap_flags) |
						   le64_to_cpu(limits->device_cap_flags));
	attr->device_cap_flags |= IB_DEVICE_MEM_MGT_EXTENSIONS;
	attr->max_qp = le32_to_cpu(from->max_qp);
	attr->max_qp_wr = min_t(u32, le32_to_cpu(from->max_qp_wr), FV_MAX_WR);
	attr->max_send_sge = le32_to_cpu(from->max_sge);
	attr->max_recv_sge = le32_to_cpu(from->max_sge);
	attr->max_sge_rd = le32_to_cpu(from->max_sge);
	attr->max_cq = le32_to_cpu(from->max_cq);
	attr->max_cqe = min_t(u32, le32_to_cpu(from->max_cqe), FV_MAX_CQE);
	/* Each has a region: what it pins, or its list of pages. */
	attr->max_mr = min(le32_to_cpu(from->max_mr), dev->max_regions);
	attr->max_pd = le32_to_cpu(from->max_pd);
	attr->max_qp_rd_atom = le32_to_cpu(from->max_qp_rd_atom);
	attr->max_qp_init_rd_atom = le32_to_cpu(from->max_qp_init_rd_atom);
	attr->max_res_rd_atom = le32_to_cpu(from->max_res_rd_atom);
	attr->atomic_cap = le32_to_cpu(limits->atomic_cap);
	attr->max_srq = le32_to_cpu(limits->max_srq);
	attr->max_srq_wr = min_t(u32, le32_to_cpu(limits->max_srq_wr), FV_MAX_WR);
	attr->max_srq_sge = le32_to_cpu(limits->max_srq_sge);
	attr->max_ah = le32_to_cpu(limits->max_ah);
	attr->max_mw = le32_to_cpu(limits->max_mw);
	attr->max_mcast_grp = le32_to_cpu(limits->max_mcast_grp);
	attr->max_mcast_qp_attach = le32_to_cpu(limits->max_mcast_qp_attach);
	attr->max_total_mcast_qp_attach = le32_to_cpu(limits->max_total_mcast_qp_attach);
	attr->max_pkeys = 1;
	attr->max_fast_reg_page_list_len = FARLANE_MAX_FAST_PAGES;
	return 0;
}

void fv_fw_str(struct ib_device *ib, char *text)
{
	const struct fv_device *dev = to_fv(ib);

	snprintf(text, IB_FW_VERSION_NAME_MAX, "%.*s", (int)sizeof(dev->attr.fw_ver),
		 dev->attr.fw_ver);
}

struct net_device *fv_get_netdev(struct ib_device *ib, u32 port)
{
	struct fv_device *dev = to_fv(ib);
	struct net_device *netdev;

	spin_lock_bh(&dev->netdev_lock);
	netdev = dev->netdev;
	dev_hold(netdev);
	spin_unlock_bh(&dev->netdev_lock);
	return netdev;
}

static bool fv_is_up(struct fv_device *dev, struct net_device *netdev)
{
	return netdev && netif_running(netdev) && netif_carrier_ok(netdev) &&
	       !farlane_client_is_dead(dev->fl);
}

int fv_query_port(struct ib_device *ib, u32 port, struct ib_port_attr *attr)
{
	struct fv_device *dev = to_fv(ib);
	const struct farlane_port_attr *from = &dev->port;
	struct net_device *netdev = fv_get_netdev(ib, port);
	bool up = fv_is_up(dev, netdev);

	memset(attr, 0, sizeof(*attr));
	attr->state = up ? IB_PORT_ACTIVE : IB_PORT_DOWN;
	attr->phys_state = up ? IB_PORT_PHYS_STATE_LINK_UP : IB_PORT_PHYS_STATE_DISABLED;
	attr->max_mtu = from->max_mtu;
	attr->active_mtu = netdev ? iboe_get_mtu(netdev->mtu) : IB_MTU_256;
	attr->active_mtu = min(attr->active_mtu, attr->max_mtu);
	attr->gid_tbl_len = le32_to_cpu(from->gid_tbl_len);
	attr->pkey_tbl_len = 1;
	attr->max_msg_sz = le32_to_cpu(from->max_msg_sz);
	attr->max_vl_num = 1;
	attr->port_cap_flags = IB_PORT_CM_SUP;
	attr->active_speed = from->active_speed;
	attr->active_width = from->active_width;
	attr->ip_gids = true;
	dev_put(netdev);
	return 0;
}

int fv_port_immutable(struct ib_device *ib, u32 port, struct ib_port_immutable *immutable)
{
	struct ib_port_attr attr;
	int err;

	err = ib_query_port(ib, port, &attr);
	if (err)
		return err;
	immutable->gid_tbl_len = attr.gid_tbl_len;
	immutable->pkey_tbl_len = attr.pkey_tbl_len;
	immutable->core_cap_flags = RDMA_CORE_PORT_IBA_ROCE_UDP_ENCAP;
	immutable->max_mad_size = IB_MGMT_MAD_SIZE;
	return 0;
}

enum rdma_link_layer fv_link_layer(struct ib_device *ib, u32 port)
{
	return IB_LINK_LAYER_ETHERNET;
}

int fv_query_pkey(struct ib_device *ib, u32 port, u16 index, u16 *pkey)
{
	if (index)
		return -EINVAL;
	*pkey = IB_DEFAULT_PKEY_FULL;
	return 0;
}

/*
 * The operator may refuse it: then the port does not have it. Nor has it one of a VLAN: packets of
 * the backend have no tag, and the connection manager drops requests to such a GID without.
 */
int fv_add_gid(const struct ib_gid_attr *attr, void **context)
{
	u16 vlan = FV_NO_VLAN;
	int err = rdma_read_gid_l2_fields(attr, &vlan, NULL);

	if (err)
		return err;
	if (vlan != FV_NO_VLAN)
		return -EOPNOTSUPP;
	return farlane_client_gid(to_fv(attr->device)->fl, FARLANE_OP_ADD_GID, attr->index,
				  attr->gid.raw);
}

int fv_del_gid(const struct ib_gid_attr *attr, void **context)
{
	int err = farlane_client_gid(to_fv(attr->device)->fl, FARLANE_OP_DEL_GID, attr->index, NULL);

	return err == -ENODEV || err == -ENOENT ? 0 : err;
}

/* Whether it is the interface of the device, not one that stands on that and has its MAC. */
static bool fv_is_its(const struct fv_device *dev, const struct net_device *netdev)
{
	return !is_zero_ether_addr(dev->mac) && ether_addr_equal(netdev->dev_addr, dev->mac) &&
	       !netdev->rtnl_link_ops;
}

/* Under the RTNL. */
static void fv_set_netdev(struct fv_device *dev, struct net_device *netdev)
{
	spin_lock_bh(&dev->netdev_lock);
	dev->netdev = netdev;
	spin_unlock_bh(&dev->netdev_lock);
}

/* Under the RTNL: tells whether the port is up, where that is news. */
static void fv_port_changed(struct fv_device *dev)
{
	bool up = fv_is_up(dev, dev->netdev);
	struct ib_event event = {
		.device = &dev->ib,
		.element.port_num = 1,
		.event = up ? IB_EVENT_PORT_ACTIVE : IB_EVENT_PORT_ERR,
	};

	if (up == dev->up || !dev->is_listened_to)
		return;
	dev->up = up;
	ib_dispatch_event(&event);
}

static int fv_netdev_event(struct notifier_block *nb, unsigned long event, void *data)
{
	struct fv_device *dev = container_of(nb, struct fv_device, netdev_events);
	struct net_device *netdev = netdev_notifier_info_to_dev(data);

	if ((event == NETDEV_REGISTER || event == NETDEV_CHANGEADDR) && !dev->netdev &&
	    fv_is_its(dev, netdev))
		fv_set_netdev(dev, netdev);
	if (netdev != dev->netdev)
		return NOTIFY_DONE;
	if (event == NETDEV_UNREGISTER)
		fv_set_netdev(dev, NULL);
	fv_port_changed(dev);
	return NOTIFY_DONE;
}

/* Whether an interface is there; one that comes later is not waited for. */
static bool fv_has_netdev(struct fv_device *dev)
{
	struct net_device *netdev = fv_get_netdev(&dev->ib, 1);
	bool has = netdev;

	dev_put(netdev);
	return has;
}

/**
 * fv_port_start - bind a device to its network interface
 * @dev: device, not registered yet
 * @netdev: the interface, or NULL for that with the MAC of the device, which is made where the
 *	administrator wants that and there is none
 *
 * Return: 0 or an error number.
 */
int fv_port_start(struct fv_device *dev, struct net_device *netdev)
{
	int err;

	dev->netdev_events.notifier_call = fv_netdev_event;
	/* Tells at once of the interfaces that there are. */
	err = register_netdevice_notifier(&dev->netdev_events);
	if (err)
		return err;
	if (!netdev) {
		err = fv_own_interface && !fv_has_netdev(dev) ? fv_own_netdev_add(dev) : 0;
		goto out;
	}
	rtnl_lock();
	if (netdev->reg_state == NETREG_REGISTERED)
		fv_set_netdev(dev, netdev);
	else
		err = -ENODEV;
	rtnl_unlock();
out:
	if (err)
		unregister_netdevice_notifier(&dev->netdev_events);
	return err;
}

/* The device is registered. */
void fv_port_listened_to(struct fv_device *dev)
{
	rtnl_lock();
	dev->is_listened_to = true;
	fv_port_changed(dev);
	rtnl_unlock();
}

/* The device is about to go. Its interface is gone for it, but is there still. */
void fv_port_stop(struct fv_device *dev)
{
	unregister_netdevice_notifier(&dev->netdev_events);
}
