//! Descriptors that came from another process.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

/// Descriptors in the order in which they came. Each is closed with its last copy.
#[derive(Debug, Clone, Default)]
pub(crate) struct Passed(Vec<Arc<OwnedFd>>);

impl Passed {
    pub(crate) const fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<OwnedFd>> {
        self.0.iter()
    }

    pub(crate) fn get(&self, index: usize) -> Option<&Arc<OwnedFd>> {
        self.0.get(index)
    }

    /// Their numbers in this process.
    pub(crate) fn numbers(&self) -> Vec<RawFd> {
        self.iter().map(|descriptor| descriptor.as_raw_fd()).collect()
    }
}

impl FromIterator<OwnedFd> for Passed {
    fn from_iter<T: IntoIterator<Item = OwnedFd>>(descriptors: T) -> Self {
        Self(descriptors.into_iter().map(Arc::new).collect())
    }
}

impl FromIterator<Arc<OwnedFd>> for Passed {
    fn from_iter<T: IntoIterator<Item = Arc<OwnedFd>>>(descriptors: T) -> Self {
        Self(descriptors.into_iter().collect())
    }
}

impl PartialEq for Passed {
    /// Whether both are the same descriptors of this process.
    fn eq(&self, other: &Self) -> bool {
        self.numbers() == other.numbers()
    }
}

impl Eq for Passed {}

/// What one call of recvmsg(2) received.
pub(crate) struct Received {
    /// Number of bytes: 0 at the end of a stream.
    pub(crate) bytes: usize,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Whether no descriptor is missing.
    pub(crate) is_whole: bool,
}

/// Receives bytes of `socket` into `buffer`, and descriptors that came with them: as many as `space` has room for.
///
/// # Errors
/// Those of recvmsg(2); then nothing came.
pub(crate) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    space: &mut [MaybeUninit<u8>],
    flags: RecvFlags,
) -> Result<Received, Errno> {
    let mut control = RecvAncillaryBuffer::new(space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let message = recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    let descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok(Received {
        bytes: message.bytes,
        descriptors: descriptors.flatten().collect(),
        is_whole: !message.flags.contains(ReturnFlags::CTRUNC),
    })
}
