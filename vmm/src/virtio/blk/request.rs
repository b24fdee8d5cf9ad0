//! Requests (virtio 1.3 §5.2.6): a chain from the guest becomes a [`Request`], or nothing when it has no place for a
//! status. The driver may cut the header, the data and the status into descriptors as it likes (§2.7.4.1).

use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::disk::{Disk, DiskSpan, SECTOR};
use crate::virtio::ring::{Chain, Segment, read, total};

/// Bytes of the header: type, reserved, sector.
const HEADER: usize = 16;
/// Bytes of a discard or write-zeroes segment: sector, number of sectors, flags.
const RANGE: usize = 16;
/// Write-zeroes flag: the sectors may be deallocated.
const UNMAP: u32 = 1;

/// The last byte of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    Ok = 0,
    /// Failed, or outside the disk, or a write to a read-only disk.
    IoError = 1,
    /// The device or the host's disk does not support the type, flag or operation.
    Unsupported = 2,
}

/// Guest memory of a transfer: `length` bytes, after the first `skip` of `segments`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Data {
    /// Descriptors that the bytes lie in.
    pub(super) segments: Vec<Segment>,
    /// Bytes of them that come before.
    pub(super) skip: u64,
    /// Bytes to transfer after those.
    pub(super) length: u64,
}

/// Action of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// Disk to memory; as many bytes in both.
    Read(DiskSpan, Data),
    /// Memory to disk; as many bytes in both.
    Write(DiskSpan, Data),
    /// Make durable what was completed.
    Flush,
    /// Write the serial number into the data.
    Identify(Data),
    /// The contents are of no more use.
    Discard(DiskSpan),
    /// The contents become zero.
    Zero {
        span: DiskSpan,
        /// Whether the space may be given back.
        may_unmap: bool,
    },
}

/// A request with a place for its status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    /// The chain's name in the used ring.
    pub(super) head: u16,
    /// Bytes in the device-writable part, the status included.
    pub(super) writable: u32,
    /// Address of the status byte.
    pub(super) status: GuestAddress,
    /// The action, or the status to answer at once.
    pub(super) action: Result<Action, Status>,
}

/// Parses a chain; `None` when it has no device-writable byte.
pub(super) fn parse(chain: Chain, memory: &GuestMemoryMmap, disk: &Disk) -> Option<Request> {
    let last = chain.writable.last()?;
    let status = GuestAddress(last.address.0.checked_add(u64::from(last.length).checked_sub(1)?)?);
    let writable = u32::try_from(total(&chain.writable)).ok()?;
    Some(Request { head: chain.head, writable, status, action: action(chain, memory, disk) })
}

fn action(chain: Chain, memory: &GuestMemoryMmap, disk: &Disk) -> Result<Action, Status> {
    let mut header = [0; HEADER];
    if read(memory, &chain.readable, 0, &mut header) != header.len() {
        return Err(Status::IoError);
    }
    let (kind, sector) = (le32(&header, 0), le64(&header, 8));
    let data_in = |chain: Chain| {
        let length = total(&chain.writable).saturating_sub(1);
        Data { segments: chain.writable, skip: 0, length }
    };
    match kind {
        0 => {
            let data = data_in(chain);
            Ok(Action::Read(span(disk, sector, data.length)?, data))
        }
        1 => {
            let length = total(&chain.readable).saturating_sub(HEADER as u64);
            let span = writable_span(disk, sector, length)?;
            Ok(Action::Write(span, Data { segments: chain.readable, skip: HEADER as u64, length }))
        }
        4 => Ok(Action::Flush),
        8 => Ok(Action::Identify(data_in(chain))),
        11 => match range(&chain, memory, disk)? {
            (span, 0) => Ok(Action::Discard(span)),
            _ => Err(Status::Unsupported),
        },
        13 => match range(&chain, memory, disk)? {
            (span, flags @ (0 | UNMAP)) => Ok(Action::Zero { span, may_unmap: flags == UNMAP }),
            _ => Err(Status::Unsupported),
        },
        _ => Err(Status::Unsupported),
    }
}

/// The one segment of a discard or write-zeroes request: the configuration space sets one as the most.
fn range(chain: &Chain, memory: &GuestMemoryMmap, disk: &Disk) -> Result<(DiskSpan, u32), Status> {
    let mut range = [0; RANGE];
    let length = total(&chain.readable).checked_sub(HEADER as u64);
    if length != Some(RANGE as u64) || read(memory, &chain.readable, HEADER as u64, &mut range) != range.len()
    {
        return Err(Status::IoError);
    }
    let bytes = u64::from(le32(&range, 8)).saturating_mul(SECTOR);
    Ok((writable_span(disk, le64(&range, 0), bytes)?, le32(&range, 12)))
}

fn span(disk: &Disk, sector: u64, bytes: u64) -> Result<DiskSpan, Status> {
    DiskSpan::new(disk.sectors(), sector, bytes).ok_or(Status::IoError)
}

fn writable_span(disk: &Disk, sector: u64, bytes: u64) -> Result<DiskSpan, Status> {
    let refused = disk.read_only() && !egm_address::fault!("read-only-disk-written");
    if refused { Err(Status::IoError) } else { span(disk, sector, bytes) }
}

fn le32(bytes: &[u8; 16], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(|b| b.first_chunk());
    u32::from_le_bytes(word.copied().unwrap_or_default())
}

fn le64(bytes: &[u8; 16], at: usize) -> u64 {
    let word = bytes.get(at..).and_then(|b| b.first_chunk());
    u64::from_le_bytes(word.copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::Bytes;

    use super::*;
    use crate::virtio::testing::memory;

    const SECTORS: u64 = 64;

    fn disk(read_only: bool) -> Disk {
        let file = tempfile::tempfile().unwrap();
        file.set_len(SECTORS * SECTOR).unwrap();
        Disk::new(file, read_only).unwrap()
    }

    fn segment(address: u64, length: u32) -> Segment {
        Segment { address: GuestAddress(address), length }
    }

    /// A header at 0x1000, followed by `payload`, in descriptors of `cut` bytes.
    fn chain(memory: &GuestMemoryMmap, kind: u32, sector: u64, payload: &[u8], cut: usize) -> Chain {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes.extend(sector.to_le_bytes());
        bytes.extend(payload);
        memory.write_slice(&bytes, GuestAddress(0x1000)).unwrap();
        let starts = (0..bytes.len()).step_by(cut);
        let readable = starts
            .map(|at| segment(0x1000 + at as u64, u32::try_from(cut.min(bytes.len() - at)).unwrap()))
            .collect();
        Chain { head: 7, readable, writable: vec![segment(0x9000, 1)] }
    }

    fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    }

    #[test]
    fn framing_does_not_matter() {
        let (memory, disk) = (memory(), disk(false));
        for cut in [1, 3, 16, 17, 1000] {
            let request = parse(chain(&memory, 1, 5, &[9; 1024], cut), &memory, &disk).unwrap();
            let Ok(Action::Write(span, data)) = request.action else { panic!("{request:?}") };
            assert_eq!((span.offset(), span.length()), (5 * 512, 1024));
            assert_eq!((data.skip, data.length, total(&data.segments)), (16, 1024, 1040));
            assert_eq!((request.head, request.writable, request.status), (7, 1, GuestAddress(0x9000)));
        }
    }

    #[test]
    fn the_status_is_the_last_writable_byte_and_the_data_all_before() {
        let (memory, disk) = (memory(), disk(true));
        let mut chain = chain(&memory, 0, 1, &[], 16);
        chain.writable = vec![segment(0x8000, 500), segment(0xa000, 13)];
        let request = parse(chain, &memory, &disk).unwrap();
        assert_eq!((request.status, request.writable), (GuestAddress(0xa00c), 513));
        let Ok(Action::Read(span, data)) = request.action else { panic!() };
        assert_eq!((span.length(), data.length, data.skip), (512, 512, 0));
    }

    #[test]
    fn each_kind_of_request_and_each_refusal() {
        use Action::{Discard, Flush, Zero};
        let (memory, disk) = (memory(), disk(false));
        let span = DiskSpan::new(SECTORS, 8, 1024).unwrap();
        let cases = [
            (4, vec![], Ok(Flush)),
            (11, range(8, 2, 0), Ok(Discard(span))),
            (11, range(8, 2, 1), Err(Status::Unsupported)),
            (11, range(63, 2, 0), Err(Status::IoError)),
            (11, range(8, 0, 0), Err(Status::IoError)),
            (11, [range(8, 2, 0), range(0, 1, 0)].concat(), Err(Status::IoError)),
            (13, range(8, 2, 0), Ok(Zero { span, may_unmap: false })),
            (13, range(8, 2, 1), Ok(Zero { span, may_unmap: true })),
            (13, range(8, 2, 2), Err(Status::Unsupported)),
            (13, range(u64::MAX, u32::MAX, 0), Err(Status::IoError)),
            (1, vec![0; 513], Err(Status::IoError)),
            (1, vec![], Err(Status::IoError)),
            (10, vec![], Err(Status::Unsupported)),
            (u32::MAX, vec![], Err(Status::Unsupported)),
        ];
        for (kind, payload, expected) in cases {
            let request = parse(chain(&memory, kind, 0, &payload, 7), &memory, &disk).unwrap();
            assert_eq!(request.action, expected, "type {kind} with {payload:?}");
        }
    }

    #[test]
    fn a_read_only_disk_refuses_whatever_writes() {
        let (memory, disk) = (memory(), disk(true));
        for (kind, payload) in [(1, vec![0; 512]), (11, range(0, 1, 0)), (13, range(0, 1, 0))] {
            let request = parse(chain(&memory, kind, 0, &payload, 16), &memory, &disk).unwrap();
            assert_eq!(request.action, Err(Status::IoError));
        }
    }

    #[test]
    fn a_chain_without_a_status_byte_or_a_whole_header() {
        let (memory, disk) = (memory(), disk(false));
        let mut no_status = chain(&memory, 4, 0, &[], 16);
        no_status.writable.clear();
        assert_eq!(parse(no_status, &memory, &disk), None);
        let mut short = chain(&memory, 4, 0, &[], 16);
        short.readable = vec![segment(0x1000, 15)];
        assert_eq!(parse(short, &memory, &disk).unwrap().action, Err(Status::IoError));
    }

    proptest! {
        /// Whatever the guest writes: what is done stays on the disk and as long as its memory.
        #[test]
        fn any_chain_is_refused_or_stays_on_the_disk(
            kind in prop_oneof![0u32..15, any::<u32>()],
            sector in prop_oneof![0u64..70, any::<u64>()],
            payload in prop::collection::vec(any::<u8>(), 0..1100),
            writable in prop::collection::vec(1u32..2000, 0..4),
            cut in 1usize..64,
        ) {
            let (memory, disk) = (memory(), disk(false));
            let mut chain = chain(&memory, kind, sector, &payload, cut);
            chain.writable = writable.iter().map(|length| segment(0x9000, *length)).collect();
            let request = parse(chain, &memory, &disk);
            prop_assert_eq!(request.is_none(), writable.is_empty());
            match request.map(|r| r.action) {
                Some(Ok(Action::Read(span, data) | Action::Write(span, data))) => {
                    prop_assert!(span.offset() + span.length() <= SECTORS * SECTOR);
                    prop_assert_eq!(span.length(), data.length);
                    prop_assert!(data.skip + data.length <= total(&data.segments));
                }
                Some(Ok(Action::Discard(span) | Action::Zero { span, .. })) => {
                    prop_assert!(span.offset() + span.length() <= SECTORS * SECTOR);
                }
                _ => {}
            }
        }
    }
}
