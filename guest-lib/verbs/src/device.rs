//! The list of devices.
//!
//! A device, once listed, stays: a program may keep it after it has freed the list. There are as
//! many as have ever been seen under different names or addresses.

use crate::errno::fail_null;
use crate::object::Plain;
use crate::sys::*;
use farlane_abi::width::{at_most, to_u64};
use farlane_rdma_client::{Context, DeviceInfo, Error, PerProcess};
use farlane_sys::sync::lock;
use std::ffi::{c_char, c_int};
use std::sync::{Mutex, OnceLock};

/// Bytes that rdma-core's own libraries look at behind `ibv_device` (`struct verbs_device`), all
/// zero: libmlx5 and libefa compare the operations there with their own.
const TAIL_WORDS: usize = 32;

/// Where the kernel has the folders of its RDMA devices.
const FOLDERS: &str = "/sys/class/infiniband/";

/// A device as programs see it, with the state of this library behind it.
#[repr(C)]
pub struct Device {
    ibv: ibv_device,
    tail: [u64; TAIL_WORDS],
    info: DeviceInfo,
    guid: OnceLock<u64>,
}

/// A device that is never freed.
#[derive(Clone, Copy)]
struct Listed(*mut Device);

// SAFETY: the device is never freed, and nothing but its `OnceLock` is written after its making.
unsafe impl Send for Listed {}

static DEVICES: PerProcess<Mutex<Vec<Listed>>> = PerProcess::new();

/// Copies text into a C array, which stays NUL terminated.
pub(crate) fn copy_text(to: &mut [c_char], text: &[u8]) {
    let room = to.len().saturating_sub(1);
    for (to, from) in to.iter_mut().take(room).zip(text) {
        *to = c_char::from_ne_bytes([*from]);
    }
}

/// The device of `info`, made when it is seen for the first time.
fn find_or_make(devices: &mut Vec<Listed>, info: DeviceInfo) -> Listed {
    for &listed in devices.iter() {
        // SAFETY: listed devices are never freed.
        if unsafe { &(*listed.0).info } == &info {
            return listed;
        }
    }
    let name = info.name();
    let mut ibv = ibv_device::zeroed();
    ibv.node_type = IBV_NODE_CA;
    ibv.transport_type = IBV_TRANSPORT_IB;
    copy_text(&mut ibv.name, name.as_bytes());
    // Not `uverbsN`: that is the file of another device where the kernel has one, and programs look
    // for this name in /dev/infiniband.
    copy_text(&mut ibv.dev_name, name.as_bytes());
    let folder = format!("/sys/class/infiniband_verbs/{name}");
    copy_text(&mut ibv.dev_path, folder.as_bytes());
    let folder = format!("{FOLDERS}{name}");
    copy_text(&mut ibv.ibdev_path, folder.as_bytes());
    let listed = Listed(Box::into_raw(Box::new(Device {
        ibv,
        tail: [0; TAIL_WORDS],
        info,
        guid: OnceLock::new(),
    })));
    devices.push(listed);
    listed
}

/// `ibv_get_device_list`.
pub unsafe fn list(count: *mut c_int) -> *mut *mut ibv_device {
    let found: Vec<Listed> = {
        let mut devices = lock(DEVICES.get());
        farlane_rdma_client::devices()
            .into_iter()
            .map(|info| find_or_make(&mut devices, info))
            .collect()
    };
    // SAFETY: plain allocation; one more entry than there are devices, so never of zero bytes.
    let list = unsafe { libc::calloc(found.len() + 1, size_of::<*mut ibv_device>()) }
        .cast::<*mut ibv_device>();
    if list.is_null() {
        return fail_null(libc::ENOMEM);
    }
    for (at, device) in found.iter().enumerate() {
        // SAFETY: the list has room for every device, and NULL stays at its end.
        unsafe { list.add(at).write(device.0.cast()) };
    }
    if !count.is_null() {
        // SAFETY: by the caller's contract.
        unsafe { count.write(at_most(to_u64(found.len()), c_int::MAX)) };
    }
    list
}

/// `ibv_free_device_list`.
pub unsafe fn free_list(list: *mut *mut ibv_device) {
    // SAFETY: `list` was allocated by `calloc` above.
    unsafe { libc::free(list.cast()) };
}

/// The C structure of a device.
pub(crate) fn listed(info: DeviceInfo) -> *mut ibv_device {
    find_or_make(&mut lock(DEVICES.get()), info).0.cast()
}

/// The listed device whose folder in sysfs this would be.
pub(crate) fn by_folder(folder: &str) -> Option<DeviceInfo> {
    let name = folder.trim_end_matches('/').strip_prefix(FOLDERS)?;
    let devices = lock(DEVICES.get());
    // SAFETY: listed devices are never freed.
    let infos = devices.iter().map(|listed| unsafe { &(*listed.0).info });
    infos.into_iter().find(|info| info.name() == name).cloned()
}

/// The GUID of a device, big-endian, as its backend says.
pub(crate) fn guid_of(info: &DeviceInfo) -> Result<[u8; 8], Error> {
    let context = Context::open(info)?;
    context.device_attributes().map(|attr| attr.node_guid)
}

/// Where a listed device is.
pub(crate) unsafe fn info<'a>(device: *mut ibv_device) -> &'a DeviceInfo {
    // SAFETY: by the caller's contract this is a listed device, which is never freed.
    unsafe { &(*device.cast::<Device>()).info }
}

/// `ibv_get_device_name`.
pub unsafe fn name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: as above; only an address is made.
    unsafe { (&raw const (*device).name).cast() }
}

/// `ibv_get_device_guid`: asks the backend the first time; zero where it does not answer.
pub unsafe fn guid(device: *mut ibv_device) -> u64 {
    // SAFETY: as above.
    let device = unsafe { &*device.cast::<Device>() };
    if let Some(guid) = device.guid.get() {
        return *guid;
    }
    match guid_of(&device.info) {
        // A GUID is big-endian in C's structures, as it is in ours.
        Ok(guid) => *device.guid.get_or_init(|| u64::from_ne_bytes(guid)),
        Err(_) => 0,
    }
}

/// `ibv_get_device_index`: -1 for a number that C's type does not have.
pub unsafe fn index(device: *mut ibv_device) -> c_int {
    // SAFETY: as above.
    let info = unsafe { info(device) };
    c_int::try_from(info.number).unwrap_or(-1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_rdma_client::Address;
    use std::ffi::CStr;

    fn info(number: u32) -> DeviceInfo {
        DeviceInfo {
            number,
            address: Address::Device(format!("/dev/farlane{number}").into()),
        }
    }

    #[test]
    fn a_device_keeps_its_address() {
        let mut devices = Vec::new();
        let first = find_or_make(&mut devices, info(0)).0;
        let second = find_or_make(&mut devices, info(12)).0;
        assert_eq!(find_or_make(&mut devices, info(0)).0, first);
        assert_eq!(devices.len(), 2);
        // SAFETY: devices are never freed.
        unsafe {
            assert_eq!(CStr::from_ptr(name(second.cast())), c"farlane12");
            assert_eq!(index(second.cast()), 12);
            assert_eq!((*second).tail, [0; TAIL_WORDS]);
        }
    }

    #[test]
    fn long_text_is_cut_and_terminated() {
        let mut to = [0; 4];
        copy_text(&mut to, b"abcdef");
        assert_eq!(to.map(|c| c.to_ne_bytes()[0]), *b"abc\0");
    }
}
