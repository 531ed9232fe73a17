//! The devices, each of which has a context of `libibverbs.so.1`, which programs see, and one of
//! connection management, which they do not.
//!
//! An address is that of the device whose port has the GID that stands for it. No interface of the
//! kernel is asked, as none need have it.

use crate::address::{self, Gid};
use crate::errno::called;
use crate::id::Address;
use crate::sys::rdma_cm_id;
use crate::verbs;
use farlane_abi::Errno;
use farlane_rdma_client::{Context, DeviceInfo, PerProcess, devices as present};
use farlane_sys::sync::lock;
use farlane_verbs_sys::{ibv_context, ibv_pd, ibv_xrcd};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

/// A device.
pub struct Device {
    info: DeviceInfo,
    verbs: Pointer<ibv_context>,
    context: Arc<Context>,
    gids: Mutex<Vec<Gid>>,
    pd: Mutex<Option<Pointer<ibv_pd>>>,
    xrcd: Mutex<Option<Pointer<ibv_xrcd>>>,
    ids: Mutex<Ids>,
}

/// The ids of a device.
#[derive(Default)]
pub struct Ids {
    /// By what the backend calls them.
    pub by_handle: BTreeMap<u32, Address>,
    /// Those that are bound to the device.
    pub all: BTreeSet<Address>,
}

/// What is kept there, or is made now.
fn kept<T>(
    place: &Mutex<Option<Pointer<T>>>,
    make: impl FnOnce() -> Result<*mut T, Errno>,
) -> Result<*mut T, Errno> {
    let mut place = lock(place);
    if let Some(Pointer(known)) = *place {
        return Ok(known);
    }
    let made = make()?;
    *place = Some(Pointer(made));
    Ok(made)
}

/// Something of `libibverbs.so.1` that is never destroyed.
struct Pointer<T>(*mut T);

// SAFETY: objects of libibverbs are usable from any thread.
unsafe impl<T> Send for Pointer<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Pointer<T> {}

static DEVICES: PerProcess<Mutex<Vec<Arc<Device>>>> = PerProcess::new();

/// All that are there, each opened when it is seen for the first time.
pub fn all() -> Vec<Arc<Device>> {
    let mut devices = lock(DEVICES.get());
    devices.retain(|device| !device.context.is_dead());
    for info in present() {
        if devices.iter().any(|device| device.info == info) {
            continue;
        }
        if let Some(device) = Device::open(info) {
            devices.push(Arc::new(device));
        }
    }
    devices.clone()
}

/// The context of `libibverbs.so.1` of the device of this name.
fn open_verbs(name: &str) -> Option<*mut ibv_context> {
    let mut count = 0;
    // SAFETY: the list has so many devices, and is freed once.
    unsafe {
        let list = verbs::ibv_get_device_list(&raw mut count);
        if list.is_null() {
            return None;
        }
        let all = (0..usize::try_from(count).unwrap_or_default()).map(|at| *list.add(at));
        let is_it = |device: &*mut _| {
            let its = CStr::from_ptr(verbs::ibv_get_device_name(*device));
            its.to_bytes() == name.as_bytes()
        };
        let context = all
            .into_iter()
            .find(is_it)
            .map(|device| verbs::ibv_open_device(device));
        verbs::ibv_free_device_list(list);
        context.filter(|context| !context.is_null())
    }
}

impl Device {
    fn open(info: DeviceInfo) -> Option<Self> {
        let context = Context::open(&info).ok()?;
        let verbs = Pointer(open_verbs(&info.name())?);
        Some(Self {
            info,
            verbs,
            context,
            gids: Mutex::default(),
            pd: Mutex::default(),
            xrcd: Mutex::default(),
            ids: Mutex::default(),
        })
    }

    /// As programs see it.
    pub fn verbs(&self) -> *mut ibv_context {
        self.verbs.0
    }

    /// Where its connections are managed.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub fn ids(&self) -> std::sync::MutexGuard<'_, Ids> {
        lock(&self.ids)
    }

    /// A protection domain for those who name none.
    pub fn pd(&self) -> Result<*mut ibv_pd, Errno> {
        kept(&self.pd, || {
            // SAFETY: the context is open.
            verbs::made(unsafe { verbs::ibv_alloc_pd(self.verbs()) })
        })
    }

    /// A domain of extended reliable connections for those who name none.
    pub fn xrcd(&self) -> Result<*mut ibv_xrcd, Errno> {
        // SAFETY: the context is open.
        kept(&self.xrcd, || unsafe { verbs::open_xrcd(self.verbs()) })
    }

    /// Asks for the GIDs of its port.
    fn read_gids(&self) -> Result<Vec<Gid>, Errno> {
        let port = called(self.context.port_attributes(1))?;
        let entries = (0..port.gid_tbl_len.get()).map(|index| called(self.context.gid(1, index)));
        let entries: Result<Vec<_>, _> = entries.collect();
        let gids: Vec<Gid> = entries?.into_iter().map(|gid| gid.raw).collect();
        lock(&self.gids).clone_from(&gids);
        Ok(gids)
    }

    /// The GIDs of its port, as they were when it was last asked.
    fn gids(&self) -> Vec<Gid> {
        let known = lock(&self.gids).clone();
        if known.is_empty() {
            return self.read_gids().unwrap_or_default();
        }
        known
    }

    /// Where its port has this GID in its table.
    pub fn index(&self, gid: Gid) -> Option<u8> {
        let index = |gids: Vec<Gid>| gids.iter().position(|its| *its == gid);
        let index = index(self.gids()).or_else(|| index(self.read_gids().ok()?));
        index.and_then(|index| u8::try_from(index).ok())
    }

    /// The first of its GIDs that stands for an address of the same family.
    fn gid_like(&self, address: IpAddr) -> Option<Gid> {
        let is_like =
            |gid: &Gid| *gid != [0; 16] && address::ip(*gid).is_ipv4() == address.is_ipv4();
        self.gids().into_iter().find(is_like)
    }

    /// Of its GIDs that which has most bits in common with this one, and how many these are.
    fn nearest(&self, to: IpAddr) -> Option<(u32, Gid)> {
        let wanted = u128::from_be_bytes(address::gid(to));
        let bits = |gid: &Gid| (u128::from_be_bytes(*gid) ^ wanted).leading_zeros();
        let is_like = |gid: &Gid| *gid != [0; 16] && address::ip(*gid).is_ipv4() == to.is_ipv4();
        let gids = self.gids().into_iter().filter(is_like);
        // Of several the first.
        gids.rev_max(|gid| bits(gid))
    }

    /// Its port has another table than before.
    pub fn forget_gids(&self) {
        lock(&self.gids).clear();
    }

    /// Enters an id.
    pub fn add(&self, id: *mut rdma_cm_id) {
        self.ids().all.insert(Address(id));
    }
}

/// The first of what has the greatest value.
trait RevMax: Iterator + Sized {
    fn rev_max<V: Ord>(self, value: impl Fn(&Self::Item) -> V) -> Option<(V, Self::Item)>;
}

impl<I: Iterator> RevMax for I {
    fn rev_max<V: Ord>(self, value: impl Fn(&I::Item) -> V) -> Option<(V, I::Item)> {
        self.fold(None, |best, item| {
            let its = value(&item);
            match best {
                Some((best, item)) if best >= its => Some((best, item)),
                _ => Some((its, item)),
            }
        })
    }
}

/// A device, and the GID of its port that stands for an address.
pub type Local = (Arc<Device>, Gid);

/// The device that has this address. A loopback address that no port has stands for the first one.
///
/// # Errors
/// `EADDRNOTAVAIL` where none has it, `ENODEV` where there is none.
pub fn with_address(ip: IpAddr) -> Result<Local, Errno> {
    let devices = all();
    let gid = address::gid(ip.to_canonical());
    if let Some(device) = devices.iter().find(|device| device.index(gid).is_some()) {
        return Ok((Arc::clone(device), gid));
    }
    let first = devices.first().ok_or(Errno::ENODEV)?;
    if !ip.to_canonical().is_loopback() {
        return Err(Errno::EADDRNOTAVAIL);
    }
    let gid = first
        .gid_like(ip.to_canonical())
        .ok_or(Errno::EADDRNOTAVAIL)?;
    Ok((Arc::clone(first), gid))
}

/// The device by which an address is reached: that whose own address has most bits in common with
/// it.
///
/// # Errors
/// `ENODEV` where there is none, `EHOSTUNREACH` where none has an address of that family.
pub fn towards(ip: IpAddr) -> Result<Local, Errno> {
    let devices = all();
    if devices.is_empty() {
        return Err(Errno::ENODEV);
    }
    let ip = ip.to_canonical();
    let near = devices
        .iter()
        .filter_map(|device| Some((device, device.nearest(ip)?)));
    let best = near.rev_max(|(_, (bits, _))| *bits);
    let (_, (device, (_, gid))) = best.ok_or(Errno::EHOSTUNREACH)?;
    Ok((Arc::clone(device), gid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_that_are_as_good_it_is_the_first() {
        let all = [(3, 'a'), (5, 'b'), (5, 'c'), (1, 'd')];
        let best = all.into_iter().rev_max(|(value, _)| *value);
        assert_eq!(best, Some((5, (5, 'b'))));
        assert_eq!(std::iter::empty::<u8>().rev_max(|value| *value), None);
    }
}
