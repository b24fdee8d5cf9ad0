//! The unsafe module of devices: the list of them, one that is open, and its attributes.
//!
//! Callers rely on this: a device's pointer is used only while its list lives, a context's only until it is closed, and
//! every number that the library returns is checked against a bound before it is used.
#![expect(unsafe_code, reason = "calls of libibverbs about devices")]

use std::ffi::{c_char, c_int};
use std::mem::offset_of;
use std::ptr::{self, NonNull};

use crate::verbs::abi::{self, VerbsContext};
use crate::verbs::library::Verbs;
use crate::verbs::library::context::{QueryDeviceEx, QueryPort};
use crate::verbs::{Abilities, Gid, GidKind, Port, VerbsError};

/// More devices than any machine has.
const MOST_DEVICES: usize = 1024;
/// GIDs that are asked for: the kernel takes a table of less than 64 KiB (2047 entries), and answers `EINVAL` beyond.
const MOST_GIDS: usize = 1024;

impl Verbs {
    /// All RDMA devices of this machine.
    ///
    /// # Errors
    ///
    /// When the library cannot list devices (no `/sys/class/infiniband_verbs`), or returns an impossible number.
    pub fn devices(&self) -> Result<Devices<'_>, VerbsError> {
        let mut count: c_int = 0;
        // SAFETY: the library writes one number and returns a list of its own.
        let list = unsafe { (self.functions.get_device_list)(&raw mut count) };
        let list = NonNull::new(list).ok_or_else(|| VerbsError::last("ibv_get_device_list"))?;
        // From here on it is freed, whatever the number is.
        let mut devices = Devices { verbs: self, list, count: 0 };
        devices.count =
            usize::try_from(count).ok().filter(|count| *count <= MOST_DEVICES).ok_or_else(|| {
                VerbsError::Bound {
                    what: "the number of RDMA devices",
                    value: value(count),
                    rule: "1024 at most",
                }
            })?;
        Ok(devices)
    }
}

/// A list of devices.
#[derive(Debug)]
pub struct Devices<'v> {
    verbs: &'v Verbs,
    list: NonNull<*mut abi::Device>,
    count: usize,
}

impl<'v> Devices<'v> {
    /// Each device, in the order of the library's list.
    pub fn iter(&self) -> impl Iterator<Item = Device<'_, 'v>> {
        (0..self.count).filter_map(|index| {
            // SAFETY: the library's list has `count` pointers.
            let entry = unsafe { self.list.add(index) };
            // SAFETY: as above; it lives until the list is freed.
            let pointer = NonNull::new(unsafe { entry.read() })?;
            Some(Device { list: self, pointer })
        })
    }
}

impl Drop for Devices<'_> {
    fn drop(&mut self) {
        // SAFETY: the list is the library's own, and no `Device` outlives it.
        unsafe { (self.verbs.functions.free_device_list)(self.list.as_ptr()) };
    }
}

/// A device of a list.
#[derive(Debug)]
pub struct Device<'l, 'v> {
    list: &'l Devices<'v>,
    pointer: NonNull<abi::Device>,
}

impl<'v> Device<'_, 'v> {
    /// The kernel's name, `mlx5_0`, 63 bytes at most.
    #[must_use]
    pub fn name(&self) -> String {
        // SAFETY: the pointer is of the library's list, which lives.
        let name = unsafe { (*self.pointer.as_ptr()).name };
        text(&name)
    }

    /// Opens it; what is opened outlives the list.
    ///
    /// # Errors
    ///
    /// When the character device may not be opened or the driver refuses.
    pub fn open(&self) -> Result<Context<'v>, VerbsError> {
        let verbs = self.list.verbs;
        // SAFETY: the pointer is of the library's list, which lives.
        let pointer = unsafe { (verbs.functions.open_device)(self.pointer.as_ptr()) };
        let pointer = NonNull::new(pointer).ok_or_else(|| VerbsError::last("ibv_open_device"))?;
        Ok(Context { verbs, pointer })
    }
}

/// A device that is open.
#[derive(Debug)]
pub struct Context<'v> {
    pub(crate) verbs: &'v Verbs,
    pub(crate) pointer: NonNull<abi::Context>,
}

impl Context<'_> {
    /// Capabilities and limits that the device reports.
    ///
    /// # Errors
    ///
    /// When the query fails.
    pub fn abilities(&self) -> Result<Abilities, VerbsError> {
        // SAFETY: integers and arrays of them, for which zero is a value.
        let mut attr: abi::DeviceAttrEx = unsafe { std::mem::zeroed() };
        if let Some(query) = self.query_device_ex() {
            let size = size_of::<abi::DeviceAttrEx>();
            // SAFETY: the context is open, and the library writes `size` bytes at most.
            let done = unsafe { query(self.pointer.as_ptr(), ptr::null(), &raw mut attr, size) };
            check("ibv_query_device_ex", done)?;
        } else {
            // SAFETY: the context is open, and the library writes one structure.
            let done =
                unsafe { (self.verbs.functions.query_device)(self.pointer.as_ptr(), &raw mut attr.orig) };
            check("ibv_query_device", done)?;
        }
        Ok(Abilities::from_attr(text(&attr.orig.fw_ver), &attr))
    }

    /// Attributes of port `number`, counted from 1.
    ///
    /// # Errors
    ///
    /// When the query fails: there is no such port.
    pub fn port(&self, number: u8) -> Result<Port, VerbsError> {
        // SAFETY: integers, for which zero is a value.
        let mut attr: abi::PortAttr = unsafe { std::mem::zeroed() };
        let context = self.pointer.as_ptr();
        let done = if let Some(query) = self.query_port() {
            // SAFETY: the context is open, and the library writes at most the size that it is given.
            unsafe { query(context, number, &raw mut attr, size_of::<abi::PortAttr>()) }
        } else {
            // SAFETY: the context is open, and the library writes one structure, or an older, shorter one.
            unsafe { (self.verbs.functions.query_port)(context, number, &raw mut attr) }
        };
        check("ibv_query_port", done)?;
        Ok(Port::from_attr(number, &attr))
    }

    /// The GIDs of all ports.
    ///
    /// # Errors
    ///
    /// When the query fails or returns an impossible number.
    pub fn gids(&self) -> Result<Vec<Gid>, VerbsError> {
        let mut table = vec![abi::GidEntry::default(); MOST_GIDS];
        let size = size_of::<abi::GidEntry>();
        let query = self.verbs.functions.query_gid_table;
        // SAFETY: the table has `MOST_GIDS` entries of `size` bytes, and both numbers are passed to the library.
        let count = unsafe { query(self.pointer.as_ptr(), table.as_mut_ptr(), MOST_GIDS, 0, size) };
        if count < 0 {
            return Err(VerbsError::call("ibv_query_gid_table", i32::try_from(-count).unwrap_or(i32::MAX)));
        }
        let gids = usize::try_from(count).ok().and_then(|count| table.get(..count)).ok_or_else(|| {
            VerbsError::Bound {
                what: "the number of GIDs",
                value: u64::try_from(count).unwrap_or(u64::MAX),
                rule: "1024 at most",
            }
        })?;
        let gid = |entry: &abi::GidEntry| {
            Some(Gid {
                bytes: bytes(entry.gid),
                index: u8::try_from(entry.gid_index).ok()?,
                port: u8::try_from(entry.port_num).ok()?,
                kind: GidKind::from_number(entry.gid_type),
                interface: entry.ndev_ifindex,
            })
        };
        Ok(gids.iter().filter_map(gid).collect())
    }

    /// A function of the structure around the context, where the library's is large enough to have it at `offset`.
    fn extended<T: Copy>(&self, offset: usize) -> Option<T> {
        let context = self.pointer.as_ptr();
        // SAFETY: the context is open.
        let marker = unsafe { (*context).abi_compat };
        if marker.addr() != abi::EXTENDED {
            return None;
        }
        let around = context.wrapping_byte_sub(offset_of!(VerbsContext, context)).cast::<VerbsContext>();
        // SAFETY: the marker shows that the context is the end of a `VerbsContext`, in which `sz` is always present.
        let size = unsafe { (*around).sz };
        if size < size_of::<VerbsContext>() - offset {
            return None;
        }
        let field = around.wrapping_byte_add(offset).cast::<Option<T>>();
        // SAFETY: the size shows that the member at `offset` exists, and `T` is its function's type.
        unsafe { field.read() }
    }

    fn query_device_ex(&self) -> Option<QueryDeviceEx> {
        self.extended(offset_of!(VerbsContext, query_device_ex))
    }

    fn query_port(&self) -> Option<QueryPort> {
        self.extended(offset_of!(VerbsContext, query_port))
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        // SAFETY: everything that was made of this context borrows it, and is gone. An error could only be logged.
        let _ = unsafe { (self.verbs.functions.close_device)(self.pointer.as_ptr()) };
    }
}

/// An error number as an error.
pub(crate) fn check(call: &'static str, number: c_int) -> Result<(), VerbsError> {
    match number {
        0 => Ok(()),
        // Some drivers answer -1 and leave the number in `errno`.
        ..0 => Err(VerbsError::last(call)),
        _ => Err(VerbsError::call(call, number)),
    }
}

/// A GID's words as they lie in memory.
fn bytes(words: [u64; 2]) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (part, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *part = word.to_ne_bytes();
    }
    bytes
}

/// C's text in an array, which need not end; what is not printable becomes `?`.
fn text(bytes: &[c_char]) -> String {
    let bytes = bytes.iter().map(|byte| byte.to_ne_bytes()[0]).take_while(|byte| *byte != 0);
    bytes.map(|byte| if byte.is_ascii_graphic() { char::from(byte) } else { '?' }).collect()
}

fn value(number: c_int) -> u64 {
    u64::from(number.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_an_end_is_taken_as_far_as_it_goes() {
        assert_eq!(text(&[109, 120, 0, 120].map(|b: i8| c_char::from_ne_bytes(b.to_ne_bytes()))), "mx");
        assert_eq!(text(&[c_char::from_ne_bytes([7]); 3]), "???");
    }

    #[test]
    fn an_error_number_is_kept() {
        assert!(check("x", 0).is_ok());
        assert_eq!(check("x", 22).unwrap_err().number(), Some(22));
    }
}
