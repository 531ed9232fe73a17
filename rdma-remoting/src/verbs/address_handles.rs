//! Address handles.

use super::CallHost;
use crate::address::{AddressVector, AhHandle, Destination, GroupGid, Recipients};
use crate::gids::PortGids;
use crate::ledger::{Resource, Share};
use crate::objects::Pd;
use crate::peers::Reach;
use crate::request::rxe::CheckAddress;
use farlane_abi::Errno;
use farlane_abi::rdma::{CreateAh, Handle};
use farlane_abi::rxe::RxeAddressed;
use std::sync::Arc;

/// Unicast LIDs are 1 to this one (IBTA 4.1.3).
const LAST_LID: u16 = 0xbfff;

/// What a flow label has room for (IBTA 8.3.2).
const FLOW_LABEL: u32 = 0xf_ffff;

/// The address that was asked for. An address without a global route header needs a LID. Of a flow
/// label the bits are taken that it has room for, as devices do: UCX asks for one of ones.
fn address(args: &CreateAh, gids: &PortGids) -> Result<AddressVector, Errno> {
    if args.port_num != 1 || args.sl > 15 {
        return Err(Errno::EINVAL);
    }
    let mut source = None;
    let to = if args.is_global == 0 {
        let lid = args.dlid.get();
        if !(1..=LAST_LID).contains(&lid) {
            return Err(Errno::EINVAL);
        }
        Recipients::Port(Destination::Lid(lid))
    } else {
        let index = args.sgid_index.into();
        source = Some(gids.get(index).ok_or(Errno::EINVAL)?);
        match GroupGid::new(args.dgid) {
            Some(group) => Recipients::Group(group),
            None => Recipients::Port(Destination::Gid(args.dgid)),
        }
    };
    Ok(AddressVector {
        to,
        sl: args.sl,
        flow_label: args.flow_label.get() & FLOW_LABEL,
        traffic_class: args.traffic_class,
        hop_limit: args.hop_limit,
        source,
    })
}

/// The addresses that a kernel's requests may say: those that it could make handles of.
pub(super) struct KernelAddresses {
    pub gids: Arc<PortGids>,
    pub reach: Arc<Reach>,
}

impl CheckAddress for KernelAddresses {
    fn check(&self, said: &RxeAddressed) -> Option<AddressVector> {
        let asked = CreateAh {
            flow_label: said.flow_label,
            dgid: said.dgid,
            is_global: 1,
            sgid_index: said.sgid_index,
            hop_limit: said.hop_limit,
            traffic_class: said.traffic_class,
            sl: said.sl,
            port_num: 1,
            ..CreateAh::default()
        };
        let address = address(&asked, &self.gids).ok()?;
        let may_reach = match address.to {
            Recipients::Port(destination) => self.reach.includes(destination),
            Recipients::Group(_) => true,
        };
        may_reach.then_some(address)
    }
}

/// An address handle of the engine, which ends when this is dropped.
struct EngineAh {
    pd: Arc<Pd>,
    handle: AhHandle,
    _share: Share,
}

impl Drop for EngineAh {
    fn drop(&mut self) {
        self.pd.keys.engine().destroy_ah(self.handle);
    }
}

impl CallHost<'_> {
    pub(super) fn add_ah(&self, args: &CreateAh) -> Result<Handle, Errno> {
        let address = address(args, &self.context.gids)?;
        // As the kernel answers where a security module or a route prohibits it. Members of a
        // group are looked at one by one, when something is sent.
        if let Recipients::Port(destination) = address.to
            && !self.context.may_reach(destination)
        {
            return Err(Errno::EACCES);
        }
        let objects = self.context.objects();
        let pd = objects.pds.get(args.pd.get()).ok_or(Errno::EBADF)?;
        let share = self.take(Resource::AddressHandles, 1)?;
        let handle = pd.keys.engine().create_ah(pd.engine, &address)?;
        let owner = EngineAh {
            pd: Arc::clone(pd),
            handle,
            _share: share,
        };
        let addresses = &self.context.addresses;
        let added = addresses.add(pd.id, (handle, address), owner);
        added.map(Into::into)
    }

    pub(super) fn remove_ah(&self, ah: Handle) -> Result<(), Errno> {
        self.context.addresses.remove(ah.get())
    }
}
