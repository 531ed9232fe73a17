//! Files of sysfs, for programs that read them by `ibv_read_sysfs_file`.
//!
//! A device of this library is none of the kernel's RDMA devices: it has no folder in sysfs, and
//! who opens files there by himself finds none. What the kernel would say of it there
//! (`Documentation/ABI/stable/sysfs-class-infiniband`) is answered from its attributes.

use crate::device::{by_folder, guid_of};
use crate::errno::set;
use farlane_abi::rdma::PortAttr;
use farlane_rdma_client::{Context, DeviceInfo, Errno, Error};
use std::ffi::{CStr, c_char, c_int};
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::Path;

/// Where sysfs is mounted.
const MOUNT: &CStr = c"/sys";

/// The folder of port 1, which is the only one.
const PORT: &str = "ports/1/";

/// Names of `enum ibv_port_state`, from 0.
const STATES: [&str; 6] = ["NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"];

/// `ibv_get_sysfs_path`.
pub fn mount() -> *const c_char {
    MOUNT.as_ptr()
}

/// `ibv_read_sysfs_file`: the length of what a file has, without the end of its line; -1 where it
/// is not there, or has no less than `size` bytes.
pub unsafe fn read(
    folder: *const c_char,
    file: *const c_char,
    buffer: *mut c_char,
    size: usize,
) -> c_int {
    // SAFETY: by the caller's contract.
    let [folder, file] = unsafe { [CStr::from_ptr(folder), CStr::from_ptr(file)] };
    let found = match (folder.to_str(), file.to_str()) {
        (Ok(folder), Ok(file)) => contents(folder, file, size),
        _ => Err(Errno::ENOENT),
    };
    let answer = found.and_then(|text| {
        let length = c_int::try_from(text.len()).map_err(|_| Errno::EINVAL)?;
        // One more byte ends it.
        if text.len() >= size {
            return Err(Errno::EINVAL);
        }
        // SAFETY: the caller has `size` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, text.len());
            buffer.add(text.len()).write(0);
        }
        Ok(length)
    });
    answer.unwrap_or_else(|errno| {
        set(errno.raw_os_error());
        -1
    })
}

/// What a file has: of the kernel's, where there is one, at most a byte more than `size`.
fn contents(folder: &str, file: &str, size: usize) -> Result<Vec<u8>, Errno> {
    let path = Path::new(folder).join(file.trim_start_matches('/'));
    if let Ok(opened) = std::fs::File::open(path) {
        let mut text = Vec::new();
        let most = u64::try_from(size).unwrap_or(u64::MAX).saturating_add(1);
        let read = opened.take(most).read_to_end(&mut text);
        read.map_err(|_| Errno::EIO)?;
        text.pop_if(|last| *last == b'\n');
        return Ok(text);
    }
    let device = by_folder(folder).ok_or(Errno::ENOENT)?;
    let text = of_device(&device, file).map_err(|error| error.errno())?;
    Ok(text.ok_or(Errno::ENOENT)?.into_bytes())
}

/// What the kernel would say of a device in a file; `None` where it would have none.
fn of_device(device: &DeviceInfo, file: &str) -> Result<Option<String>, Error> {
    match file {
        "node_type" => return Ok(Some("1: CA".into())),
        "node_guid" | "sys_image_guid" => return Ok(Some(groups(&guid_of(device)?))),
        _ => {}
    }
    let context = Context::open(device)?;
    if file == "fw_ver" {
        let version = context.device_attributes()?.fw_ver;
        let version = version.split(|byte| *byte == 0).next();
        return Ok(version.map(|text| String::from_utf8_lossy(text).into_owned()));
    }
    let Some(file) = file.strip_prefix(PORT) else {
        return Ok(None);
    };
    if let Some(index) = file.strip_prefix("gids/") {
        let attr = context.port_attributes(1)?;
        let index = index.parse().ok().filter(|index| attr.gid_tbl_len > *index);
        return index.map_or(Ok(None), |index| {
            Ok(Some(groups(&context.gid(1, index)?.raw)))
        });
    }
    Ok(of_port(&context.port_attributes(1)?, file))
}

/// The same in the folder of a port.
fn of_port(attr: &PortAttr, file: &str) -> Option<String> {
    Some(match file {
        "state" => format!("{}: {}", attr.state, STATES.get(usize::from(attr.state))?),
        "phys_state" if attr.phys_state == 5 => "5: LinkUp".into(),
        "link_layer" if attr.link_layer == 2 => "Ethernet".into(),
        "lid" => format!("{:#x}", attr.lid),
        "pkeys/0" => "0xffff".into(),
        "gid_attrs/types/0" => "RoCE v2".into(),
        _ => return None,
    })
}

/// Bytes as the kernel writes GUIDs and GIDs: four hexadecimal digits of two bytes.
fn groups(bytes: &[u8]) -> String {
    let mut text = String::new();
    for pair in bytes.chunks(2) {
        if !text.is_empty() {
            text.push(':');
        }
        for byte in pair {
            // Writing to a string does not fail.
            let _ = write!(text, "{byte:02x}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_to(folder: &CStr, file: &CStr, size: usize) -> (c_int, Vec<u8>) {
        let mut buffer = [0x7f_u8; 64];
        // SAFETY: as a C program calls it.
        let length = unsafe {
            let to = buffer.as_mut_ptr().cast();
            read(folder.as_ptr(), file.as_ptr(), to, size)
        };
        (length, buffer.to_vec())
    }

    #[test]
    fn a_file_that_there_is_is_read_without_the_end_of_its_line() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("version"), "12\n").unwrap();
        let path = std::ffi::CString::new(folder.path().to_str().unwrap()).unwrap();
        let (length, text) = read_to(&path, c"version", 64);
        assert_eq!((length, &text[..4]), (2, &b"12\0\x7f"[..]));
        // Without room for its end, it is no text.
        let (length, text) = read_to(&path, c"version", 2);
        assert_eq!((length, text[0]), (-1, 0x7f));
        assert_eq!(read_to(&path, c"version", 0).0, -1);
        assert_eq!(read_to(&path, c"nothing", 64).0, -1);
        assert_eq!(read_to(c"/sys/class/infiniband/none", c"fw_ver", 64).0, -1);
    }

    #[test]
    fn a_port_is_described_as_the_kernel_does_it() {
        let attr = PortAttr {
            state: 4,
            phys_state: 5,
            link_layer: 2,
            lid: 0x12.into(),
            ..PortAttr::default()
        };
        for (file, text) in [
            ("state", Some("4: ACTIVE")),
            ("phys_state", Some("5: LinkUp")),
            ("link_layer", Some("Ethernet")),
            ("lid", Some("0x12")),
            ("pkeys/0", Some("0xffff")),
            ("pkeys/1", None),
            ("gid_attrs/types/0", Some("RoCE v2")),
            ("gid_attrs/types/1", None),
            ("rate", None),
        ] {
            assert_eq!(of_port(&attr, file).as_deref(), text, "{file}");
        }
        assert_eq!(groups(&[0, 0x1a, 0xff, 2]), "001a:ff02");
    }
}
