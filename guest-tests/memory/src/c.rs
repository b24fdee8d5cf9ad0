//! The C face: `include/egm_memory.h`. This is an unsafe module.
//!
//! The header states what C callers must guarantee; their pointers are used only under those guarantees.
#![expect(unsafe_code, reason = "C calls by pointer")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::AsRawFd;
use std::ptr;

use egm_address::PciAddress;
use rustix::io::Errno;

use crate::MemoryError;
use crate::function::{Found, find};
use crate::mapping::Memory;

/// `struct egm_memory`.
#[repr(C)]
#[derive(Debug)]
pub struct CMemory {
    address: *mut c_void,
    size: u64,
    page: u64,
    pxm: u32,
    file: c_int,
    handle: *mut c_void,
}

/// `egm_memory_open`: 0, or a negative error number.
///
/// # Safety
/// `function` is null or a string that ends in NUL; `memory` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_memory_open(function: *const c_char, memory: *mut CMemory) -> c_int {
    // SAFETY: the caller's promise.
    let name = (!function.is_null()).then(|| unsafe { CStr::from_ptr(function) });
    let opened = find().map_err(|error| number(&error)).and_then(|found| open(&found, name));
    match (opened, memory.is_null()) {
        (Err(error), _) => -error,
        (_, true) => -Errno::INVAL.raw_os_error(),
        (Ok(opened), false) => {
            // SAFETY: the caller's promise.
            unsafe { memory.write(opened) };
            0
        }
    }
}

/// `egm_memory_close`.
///
/// # Safety
/// `memory` is null, or was filled by `egm_memory_open` and not closed since.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_memory_close(memory: *mut CMemory) {
    // SAFETY: the caller's promise.
    let Some(memory) = (unsafe { memory.as_mut() }) else { return };
    let handle = std::mem::replace(&mut memory.handle, ptr::null_mut()).cast::<Memory>();
    if !handle.is_null() {
        // SAFETY: `open` made it of a box, and it was taken out of the structure, so this is the only time.
        drop(unsafe { Box::from_raw(handle) });
    }
}

/// The function called `name`, or the first that is not broken; mapped.
fn open(found: &Found, name: Option<&CStr>) -> Result<CMemory, c_int> {
    let parsed = |name: &CStr| name.to_str().ok().and_then(|name| name.parse::<PciAddress>().ok());
    let wanted = name.map(|name| parsed(name).ok_or_else(|| Errno::INVAL.raw_os_error())).transpose()?;
    let is_wanted = |address: PciAddress| wanted.is_none_or(|wanted| wanted == address);
    let function = found.functions.iter().find(|function| is_wanted(function.address));
    let function = function.ok_or_else(|| {
        let broken = found.broken.iter().find(|(address, _)| is_wanted(*address));
        broken.map_or_else(|| Errno::NODEV.raw_os_error(), |(_, error)| number(error))
    })?;
    let memory = Box::new(function.map().map_err(|error| number(&error))?);
    Ok(CMemory {
        address: memory.address().as_ptr().cast(),
        size: memory.size(),
        page: function.facts.page,
        pxm: function.facts.pxm.unwrap_or(u32::MAX),
        file: memory.file().as_raw_fd(),
        handle: Box::into_raw(memory).cast(),
    })
}

fn number(error: &MemoryError) -> c_int {
    let source = match error {
        MemoryError::File { source, .. } => source.raw_os_error(),
        MemoryError::Form { .. } | MemoryError::Short { .. } | MemoryError::Silent { .. } => None,
    };
    source.unwrap_or(Errno::IO.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Facts;
    use crate::function::find_in;
    use crate::testing;

    const FACTS: Facts = Facts { size: 0x20_0000, base: 0, page: 0x1000, pxm: Some(4) };

    #[test]
    fn a_program_gets_address_size_page_domain_and_file_until_it_closes() {
        let root = tempfile::tempdir().unwrap();
        testing::function(root.path(), "0000:01:00.0", &FACTS, 0x80_0000_0000, 0x20_0000);
        let found = find_in(root.path()).unwrap();
        let mut memory = open(&found, Some(c"0000:01:00.0")).unwrap();
        assert_eq!((memory.size, memory.page, memory.pxm), (0x20_0000, 0x1000, 4));
        assert!(memory.file >= 0 && memory.address.addr().is_multiple_of(0x20_0000));
        for _ in 0..2 {
            // SAFETY: `open` filled it; to close it again does nothing.
            unsafe { egm_memory_close(&raw mut memory) };
            assert!(memory.handle.is_null());
        }
    }

    #[test]
    fn what_is_not_there_or_no_address_is_a_number() {
        let none = Found::default();
        assert_eq!(open(&none, None).unwrap_err(), 19, "ENODEV");
        assert_eq!(open(&none, Some(c"0000:01:00.0")).unwrap_err(), 19);
        assert_eq!(open(&none, Some(c"gpu")).unwrap_err(), 22, "EINVAL");
    }

    #[test]
    fn a_broken_function_is_an_error_where_it_is_named_or_the_only_one() {
        let root = tempfile::tempdir().unwrap();
        testing::function(root.path(), "0000:01:00.0", &FACTS, 0x80_0000_0000, 0x10_0000);
        let broken = find_in(root.path()).unwrap();
        assert_eq!(open(&broken, None).unwrap_err(), 5, "EIO");
        testing::function(root.path(), "0000:02:00.0", &FACTS, 0x80_0000_0000, 0x20_0000);
        let found = find_in(root.path()).unwrap();
        assert_eq!(open(&found, Some(c"0000:01:00.0")).unwrap_err(), 5);
        let mut memory = open(&found, None).unwrap();
        assert_eq!(memory.size, 0x20_0000);
        // SAFETY: `open` filled it.
        unsafe { egm_memory_close(&raw mut memory) };
    }
}
