//! Tap interfaces: opening one for a guest, and the few requests that a running device makes of it.
//!
//! This is an unsafe module: ioctls of `/dev/net/tun`. Each passes an integer, or a struct laid out as `ifreq`
//! that lives through the call; the kernel copies what it is given.
#![expect(unsafe_code, reason = "a tap is configured by ioctls that no crate here wraps")]

use std::fs::File;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::{Access, AtFlags, FileType, OFlags, RawMode, StatxFlags, fcntl_getfl, fcntl_setfl, statx};
use rustix::net::AddressFamily;
use rustix::net::SocketType;
use vmm_sys_util::ioctl::ioctl_with_mut_ref;
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl::ioctl_with_val;

use crate::error::{Blame, Remedy, Report};
use crate::inherited;

/// Bytes of the header before each packet: `virtio_net_hdr` with `num_buffers` (virtio 1.3 §5.1.6).
pub const HEADER: u32 = 12;

const TUN: &str = "/dev/net/tun";
const MAX_NAME: usize = libc::IFNAMSIZ - 1;

/// Why a tap interface cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum TapError {
    /// Not a name that an interface can have.
    #[error("tap name {name:?} has {} bytes; an interface name has 1 to {MAX_NAME}, without NUL or '/'", name.len())]
    Name { name: String },
    #[error("tap {name} does not exist")]
    Missing {
        name: String,
        /// Queue pairs that it is wanted for.
        queue_pairs: u16,
    },
    /// An interface of that name is something else.
    #[error("{name} is not a tap interface")]
    NotTap { name: String },
    /// The tap was made for one queue.
    #[error("tap {name} has a single queue, and {queue_pairs} queue pairs need a multi-queue tap")]
    SingleQueue { name: String, queue_pairs: u16 },
    /// Another process holds it.
    #[error("tap {name} is in use by another process")]
    Busy { name: String },
    /// The tap belongs to another user.
    #[error("no permission to use tap {name}, which belongs to another user")]
    Owner { name: String },
    /// `/dev/net/tun` cannot be opened.
    #[error("cannot open {TUN} for tap {name}")]
    Device {
        name: String,
        #[source]
        source: io::Error,
    },
    /// A number without a file, or with one that is no tap.
    #[error("cannot use descriptor {number}: it is not open, or is no tap")]
    Descriptor {
        number: i32,
        #[source]
        source: Option<io::Error>,
    },
    /// A tap with packets of another form.
    #[error("cannot use descriptor {number}: its tap is not one with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR")]
    Form { number: i32 },
    /// The kernel refused something that it should not.
    #[error("cannot use tap {name}: {request} failed")]
    Request {
        name: String,
        request: &'static str,
        #[source]
        source: io::Error,
    },
}

impl Report for TapError {
    fn remedy(&self) -> Remedy {
        let user = rustix::process::getuid().as_raw();
        match self {
            Self::Name { .. } => Blame::Configuration.help("set \"tap\" to the name of a tap interface"),
            Self::Missing { name, queue_pairs } => {
                let multi = if *queue_pairs > 1 { " multi_queue" } else { "" };
                Blame::Host.help(format!(
                    "ip tuntap add {name} mode tap user {user}{multi} && ip link set {name} up (as root)"
                ))
            }
            Self::NotTap { .. } => {
                Blame::Host.help("set \"tap\" to an interface that `ip tuntap show` lists")
            }
            Self::SingleQueue { name, .. } => Blame::Host.help(format!(
                "set \"queue_pairs\": 1, or make it again: ip tuntap del {name} mode tap; \
                 ip tuntap add {name} mode tap user {user} multi_queue (as root)"
            )),
            Self::Busy { .. } => {
                Blame::Host.help("give each VM a tap of its own, or end the VM that holds this one")
            }
            Self::Owner { name } => Blame::Host.help(format!(
                "ip tuntap del {name} mode tap && ip tuntap add {name} mode tap user {user} (as root)"
            )),
            Self::Device { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Blame::Host.help("modprobe tun (as root)")
            }
            Self::Device { .. } => {
                Blame::Host.help(format!("chmod 0666 {TUN} (as root); taps have owners of their own"))
            }
            Self::Descriptor { .. } => Blame::Configuration.help(
                "pass a descriptor of /dev/net/tun after TUNSETIFF, or of a macvtap: 3<>/dev/tapN in a shell",
            ),
            Self::Form { .. } => {
                Blame::Configuration.help("open it with IFF_TAP | IFF_NO_PI | IFF_VNET_HDR (TUNSETIFF)")
            }
            Self::Request { .. } => Blame::Host.into(),
        }
    }
}

/// Opens one non-blocking descriptor a queue pair on the tap `name`, which must exist; every packet then has a header
/// of [`HEADER`] bytes before it.
///
/// # Errors
/// [`TapError`] names the fault of the tap and how to make a right one.
pub fn open(name: &str, queue_pairs: u16) -> Result<Vec<File>, TapError> {
    // With CAP_NET_ADMIN, TUNSETIFF makes what does not exist: a misspelt name would become an interface.
    find(name, queue_pairs)?;
    if queue_pairs > 1 {
        return (0..queue_pairs).map(|_| queue(name, true)).collect::<Result<_, _>>().map_err(|error| {
            match error {
                TapError::NotTap { name } if !matches!(queue(&name, false), Err(TapError::NotTap { .. })) => {
                    TapError::SingleQueue { name, queue_pairs }
                }
                other => other,
            }
        });
    }
    // A multi-queue tap serves a single pair as well, but must be asked as one.
    let file = match queue(name, false) {
        Err(TapError::NotTap { .. }) => queue(name, true),
        other => other,
    };
    file.map(|file| vec![file])
}

/// The same for descriptors of a tap that this process has under `numbers`, one for each queue pair. What is returned are
/// duplicates, with the open files of the originals.
///
/// # Errors
/// [`TapError`]: a number without a file, or with one that is no tap as this device needs it.
pub fn adopt(numbers: &[i32]) -> Result<Vec<File>, TapError> {
    numbers.iter().map(|number| adopt_one(*number)).collect()
}

fn adopt_one(number: i32) -> Result<File, TapError> {
    let failed = |request| {
        move |source| TapError::Request { name: format!("by descriptor {number}"), request, source }
    };
    let descriptor = inherited::descriptor(number)
        .map_err(|source| TapError::Descriptor { number, source: Some(source) })?;
    check_adopted(number, descriptor.as_fd())?;
    let file = File::from(descriptor);
    let flags = fcntl_getfl(&file).map_err(|error| failed("F_GETFL")(error.into()))?;
    fcntl_setfl(&file, flags | OFlags::NONBLOCK).map_err(|error| failed("F_SETFL")(error.into()))?;
    set_header(&file).map_err(failed("TUNSETVNETHDRSZ"))?;
    Ok(file)
}

/// Checks that `descriptor`, which has this `number` for its owner, is a tap with a header before each packet.
///
/// # Errors
/// [`TapError::Descriptor`], [`TapError::Form`].
pub(crate) fn check_adopted(number: i32, descriptor: BorrowedFd<'_>) -> Result<(), TapError> {
    // Does not wait for the server of a file system.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let kind = statx(descriptor, c"", flags, StatxFlags::TYPE)
        .map(|found| FileType::from_raw_mode(RawMode::from(found.stx_mode)));
    let unfit = TapError::Descriptor { number, source: None };
    if !kind.is_ok_and(FileType::is_char_device) {
        return Err(unfit);
    }
    let mut request = interface_request("", 0);
    // SAFETY: a driver of taps writes one `ifreq`, which lives through the call. A request of this number writes four bytes at
    // most elsewhere, as the number has it, and the structure has more.
    let result = unsafe { ioctl_with_mut_ref(&descriptor, libc::TUNGETIFF, &mut request) };
    if check(result).is_err() {
        return Err(unfit);
    }
    if has_header_alone(request.flags.into()) { Ok(()) } else { Err(TapError::Form { number }) }
}

/// Whether packets of a tap with `flags` have the header of virtio-net before them and nothing else.
const fn has_header_alone(flags: libc::c_int) -> bool {
    let needed = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    flags & needed == needed
}

fn set_header(tap: &File) -> io::Result<()> {
    let size = HEADER;
    // SAFETY: the kernel copies the integer, which lives through the call.
    check(unsafe { ioctl_with_ref(tap, libc::TUNSETVNETHDRSZ, &size) })
}

/// Refuses a name that no interface can have, or has.
fn find(name: &str, queue_pairs: u16) -> Result<(), TapError> {
    let name = name.to_owned();
    if name.is_empty() || name.len() > MAX_NAME || name.contains(['\0', '/']) {
        return Err(TapError::Name { name });
    }
    if exists(&name) { Ok(()) } else { Err(TapError::Missing { name, queue_pairs }) }
}

/// Checks that [`open`] would open the tap `name`, as far as the kernel's files show it; attaches to nothing.
///
/// # Errors
/// [`TapError`], as [`open`].
pub(crate) fn inspect(name: &str, queue_pairs: u16) -> Result<(), TapError> {
    find(name, queue_pairs)?;
    rustix::fs::access(TUN, Access::READ_OK | Access::WRITE_OK)
        .map_err(|error| TapError::Device { name: name.to_owned(), source: error.into() })?;
    let read =
        |file: &str| std::fs::read_to_string(format!("/sys/class/net/{name}/{file}")).unwrap_or_default();
    let tap = Attributes { flags: read("tun_flags"), owner: read("owner"), carrier: read("carrier") };
    tap.check(name, queue_pairs, rustix::process::geteuid().as_raw())
}

/// Files of a tap in sysfs; empty where it has none.
struct Attributes {
    /// `IFF_*` in hexadecimal; other interfaces have no such file.
    flags: String,
    /// User id, or -1.
    owner: String,
    /// 1 while a process has it open.
    carrier: String,
}

impl Attributes {
    fn check(&self, name: &str, queue_pairs: u16, uid: u32) -> Result<(), TapError> {
        let name = name.to_owned();
        let flags = self.flags.trim().trim_start_matches("0x");
        let flags = libc::c_int::from_str_radix(flags, 16).unwrap_or(0);
        let is_multi_queue = flags & libc::IFF_MULTI_QUEUE != 0;
        let other_owner = self.owner.trim().parse().is_ok_and(|owner: u32| owner != uid);
        if flags & libc::IFF_TAP == 0 {
            Err(TapError::NotTap { name })
        } else if queue_pairs > 1 && !is_multi_queue {
            Err(TapError::SingleQueue { name, queue_pairs })
        } else if other_owner && uid != 0 {
            Err(TapError::Owner { name })
        } else if !is_multi_queue && self.carrier.trim() == "1" {
            Err(TapError::Busy { name })
        } else {
            Ok(())
        }
    }
}

fn exists(name: &str) -> bool {
    let Ok(socket) = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None) else {
        return true; // let the next step say what is wrong
    };
    rustix::net::netdevice::name_to_index(socket, name).is_ok()
}

fn queue(name: &str, multi: bool) -> Result<File, TapError> {
    let owned = || name.to_owned();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(TUN)
        .map_err(|source| TapError::Device { name: owned(), source })?;

    let multi = if multi { libc::IFF_MULTI_QUEUE } else { 0 };
    let mut request = interface_request(name, libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | multi);
    // SAFETY: the kernel reads and writes one `ifreq`, which lives through the call.
    let result = unsafe { ioctl_with_mut_ref(&file, libc::TUNSETIFF, &mut request) };
    check(result).map_err(|source| match source.raw_os_error() {
        Some(libc::EINVAL) => TapError::NotTap { name: owned() },
        Some(libc::EBUSY) => TapError::Busy { name: owned() },
        Some(libc::EPERM) => TapError::Owner { name: owned() },
        _ => TapError::Request { name: owned(), request: "TUNSETIFF", source },
    })?;

    set_header(&file).map_err(|source| TapError::Request {
        name: owned(),
        request: "TUNSETVNETHDRSZ",
        source,
    })?;
    Ok(file)
}

/// Sets which unfinished packets (`TUN_F_*`) the guest takes.
///
/// # Errors
/// The error of the ioctl TUNSETOFFLOAD.
pub(crate) fn set_offload(tap: &File, flags: u32) -> io::Result<()> {
    // SAFETY: the argument is an integer.
    let result = unsafe { ioctl_with_val(tap, libc::TUNSETOFFLOAD, libc::c_ulong::from(flags)) };
    check(result)
}

/// Attaches or detaches one queue of a multi-queue tap: the kernel spreads packets over attached queues only. To
/// attach what is attached is no error, and likewise for detached.
///
/// # Errors
/// The error of the ioctl TUNSETQUEUE.
pub(crate) fn set_attached(tap: &File, attached: bool) -> io::Result<()> {
    let flag = if attached { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
    let request = interface_request("", flag);
    // SAFETY: the kernel copies the struct, which lives through the call.
    let result = unsafe { ioctl_with_ref(tap, libc::TUNSETQUEUE, &request) };
    match check(result) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()), // so already
        other => other,
    }
}

/// `struct ifreq` with its union as flags, and no byte of it uninitialised.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; libc::IFNAMSIZ],
    flags: libc::c_short,
    rest: [u8; size_of::<libc::ifreq>() - libc::IFNAMSIZ - size_of::<libc::c_short>()],
}

const _: () = assert!(size_of::<InterfaceRequest>() == size_of::<libc::ifreq>());

/// `name` is shorter than `IFNAMSIZ`; `flags` are `IFF_*` of taps, which have 15 bits.
fn interface_request(name: &str, flags: libc::c_int) -> InterfaceRequest {
    let mut request =
        InterfaceRequest { name: [0; _], flags: libc::c_short::try_from(flags).unwrap_or(0), rest: [0; _] };
    for (to, from) in request.name.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    request
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::error::Chain;

    #[test]
    fn names_that_no_interface_can_have_are_refused() {
        for name in ["", "sixteen-bytes-xx", "a/b", "a\0b"] {
            assert!(matches!(open(name, 1), Err(TapError::Name { .. })), "{name:?}");
        }
    }

    #[test]
    fn a_tap_that_does_not_exist_is_not_made_but_comes_with_the_command_that_makes_it() {
        let error = open("egm-no-such0", 4).unwrap_err();
        let text = Chain(&error).to_string();
        assert!(text.starts_with("error: tap egm-no-such0 does not exist\n"), "{text}");
        assert!(text.contains("help: ip tuntap add egm-no-such0 mode tap user "), "{text}");
        assert!(text.contains(" multi_queue "), "{text}");
        assert!(!exists("egm-no-such0"));
    }

    #[test]
    fn a_tap_is_judged_by_its_files_without_attaching_to_it() {
        let judged = |flags: &str, owner: &str, carrier: &str, queue_pairs| {
            let tap = Attributes { flags: flags.into(), owner: owner.into(), carrier: carrier.into() };
            tap.check("t0", queue_pairs, 1000)
        };
        let (single, multi) = ("0x5802\n", "0x5902\n");
        judged(single, "-1\n", "0\n", 1).unwrap();
        judged(single, "1000\n", "", 1).unwrap();
        judged(multi, "1000\n", "1\n", 4).unwrap();
        assert!(matches!(judged("", "", "1\n", 1), Err(TapError::NotTap { .. })));
        assert!(matches!(judged("0x5801\n", "-1\n", "0\n", 1), Err(TapError::NotTap { .. })));
        assert!(matches!(judged(single, "-1\n", "0\n", 2), Err(TapError::SingleQueue { .. })));
        assert!(matches!(judged(single, "0\n", "0\n", 1), Err(TapError::Owner { .. })));
        assert!(matches!(judged(single, "1000\n", "1\n", 1), Err(TapError::Busy { .. })));
        assert!(matches!(inspect("sixteen-bytes-xx", 1), Err(TapError::Name { .. })));
        assert!(matches!(inspect("egm-no-such0", 1), Err(TapError::Missing { .. })));
    }

    #[test]
    fn packets_of_an_adopted_tap_have_the_header_of_virtio_net_alone() {
        let all = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        assert!(has_header_alone(all) && has_header_alone(all | libc::IFF_MULTI_QUEUE));
        for missing in [libc::IFF_TAP, libc::IFF_NO_PI, libc::IFF_VNET_HDR] {
            assert!(!has_header_alone(all & !missing | libc::IFF_TUN), "{missing:#x}");
        }
    }

    #[test]
    fn what_is_no_tap_is_not_adopted() {
        let (file, null) = (tempfile::tempfile().unwrap(), File::open("/dev/null").unwrap());
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        for number in [file.as_raw_fd(), null.as_raw_fd(), socket.as_raw_fd(), 1_000_000] {
            let error = adopt(&[number]).unwrap_err();
            assert!(matches!(&error, TapError::Descriptor { number: refused, .. } if *refused == number));
            assert_eq!(error.blame(), Blame::Configuration);
        }
        // Opened, and no interface yet.
        let Ok(tun) = OpenOptions::new().read(true).write(true).open(TUN) else {
            return println!("skipped: no tap can be made here: {TUN} cannot be opened");
        };
        assert!(matches!(adopt(&[tun.as_raw_fd()]), Err(TapError::Descriptor { .. })));
    }

    #[test]
    fn an_interface_of_another_kind_is_not_a_tap() {
        let error = open("lo", 1).unwrap_err();
        let expected = match error {
            TapError::Device { .. } | TapError::Owner { .. } => return println!("skipped: {error}"),
            other => other,
        };
        assert_eq!(expected.to_string(), "lo is not a tap interface");
    }
}
