//! POSIX access control lists, as the kernel stores them in `system.posix_acl_access`. Pure.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

/// The only version of the format.
const VERSION: u32 = 2;

/// Permissions, as the three lowest bits of a mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AccessList {
    /// The owning group, by the mask.
    pub(crate) group: u16,
    /// Users that no other entry names.
    pub(crate) other: u16,
    /// Named users, by the mask.
    pub(crate) users: Vec<(u32, u16)>,
    /// Named groups, by the mask.
    pub(crate) groups: Vec<(u32, u16)>,
}

impl AccessList {
    /// The list in `bytes`; `None` for what no kernel writes.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (version, entries) = bytes.split_first_chunk()?;
        let (entries, []) = entries.as_chunks::<8>() else { return None };
        if u32::from_le_bytes(*version) != VERSION {
            return None;
        }
        let (mut owner, mut group, mut other, mut mask) = (None, None, None, None);
        let (mut users, mut groups) = (Vec::new(), Vec::new());
        for [t0, t1, p0, p1, id @ ..] in entries {
            let (permissions, id) = (u16::from_le_bytes([*p0, *p1]), u32::from_le_bytes(*id));
            let only = match u16::from_le_bytes([*t0, *t1]) {
                0x01 => &mut owner,
                0x04 => &mut group,
                0x10 => &mut mask,
                0x20 => &mut other,
                0x02 => {
                    users.push((id, permissions));
                    continue;
                }
                0x08 => {
                    groups.push((id, permissions));
                    continue;
                }
                _ => return None,
            };
            if permissions > 7 || only.replace(permissions).is_some() {
                return None;
            }
        }
        owner?;
        // Only a list without named entries needs no mask.
        let mask = mask.or_else(|| (users.is_empty() && groups.is_empty()).then_some(7))?;
        let masked = |named: Vec<(u32, u16)>| named.into_iter().map(|(id, bits)| (id, bits & mask)).collect();
        Some(Self { group: group? & mask, other: other?, users: masked(users), groups: masked(groups) })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The kernel's form of entries of tag, permissions and user or group.
    pub(crate) fn encode(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let entry = |(tag, permissions, id): &(u16, u16, u32)| {
            [&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
        };
        [VERSION.to_le_bytes().to_vec(), entries.iter().flat_map(entry).collect()].concat()
    }

    const NONE: u32 = u32::MAX;

    #[test]
    fn a_mask_limits_groups_and_named_users_and_no_other_entry() {
        let entries =
            [(1, 7, NONE), (2, 6, 1000), (4, 7, NONE), (8, 5, 500), (0x10, 4, NONE), (0x20, 6, NONE)];
        let list = AccessList::parse(&encode(&entries)).unwrap();
        let expected = AccessList { group: 4, other: 6, users: vec![(1000, 4)], groups: vec![(500, 4)] };
        assert_eq!(list, expected);
        let plain = AccessList::parse(&encode(&[(1, 6, NONE), (4, 4, NONE), (0x20, 0, NONE)])).unwrap();
        assert_eq!((plain.group, plain.other), (4, 0));
    }

    #[test]
    fn a_list_that_no_kernel_writes_is_refused() {
        let good = [(1, 6, NONE), (4, 0, NONE), (0x20, 0, NONE)];
        let with = |entry| encode(&[&good[..], &[entry]].concat());
        let mut cut = encode(&good);
        cut.pop();
        let mut version = encode(&good);
        version[0] = 1;
        let named_without_mask = with((2, 6, 1000));
        let cases =
            [Vec::new(), cut, version, with((4, 6, NONE)), with((0x40, 6, NONE)), with((0x10, 9, NONE))];
        for bytes in cases.into_iter().chain([named_without_mask, encode(&good[..2]), encode(&good[1..])]) {
            assert_eq!(AccessList::parse(&bytes), None, "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_list_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = AccessList::parse(&bytes);
        }
    }
}
