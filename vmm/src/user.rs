//! The user that a machine becomes before its first guest instruction.

use std::collections::BTreeSet;
use std::fs;
use std::io;

use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::set_no_new_privs;

use crate::error::{Blame, Remedy, Report};

/// A user of this host other than root, with all groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

/// Why the machine does not become a user.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UserError {
    #[error("cannot run the machine as user {name:?}: this host has no such user")]
    Unknown { name: String },
    #[error("cannot run the machine as user {name:?}: it is root")]
    Root { name: String },
    #[error("cannot run the machine as another user: this process is not root's")]
    NotRoot,
    #[error("cannot drop privileges: no other process would return the machine's slices")]
    NoKeeper,
    #[error("cannot {step}")]
    Drop { step: &'static str, source: io::Error },
    #[error(
        "cannot drop the privileges of thread {thread}: its {field} is {found:?}, and must be {expected:?}"
    )]
    Kept { thread: String, field: &'static str, found: String, expected: String },
}

impl Report for UserError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Unknown { .. } | Self::Root { .. } => Blame::Configuration
                .help("name a user of /etc/passwd that is not root, as --user NAME or its number"),
            Self::NotRoot => {
                Blame::Host.help("run it with sudo; an unprivileged user asks a broker: --broker SOCKET")
            }
            Self::NoKeeper => Blame::Internal.into(),
            Self::Drop { .. } | Self::Kept { .. } => Blame::Host.into(),
        }
    }
}

impl User {
    /// The user called `name`, or with this number.
    ///
    /// # Errors
    /// [`UserError`]: no such user, or root; or this process is not root's and could not become any.
    pub(crate) fn find(name: &str) -> Result<Self, UserError> {
        if !rustix::process::geteuid().is_root() {
            return Err(UserError::NotRoot);
        }
        let text = |path: &'static str| {
            fs::read_to_string(path)
                .map_err(|source| UserError::Drop { step: "read the users of this host", source })
        };
        Self::among(name, &text("/etc/passwd")?, &text("/etc/group")?)
    }

    /// The same by the texts of `/etc/passwd` and `/etc/group`. (The C library's functions load modules for other sources of
    /// users, which a static program cannot do.)
    fn among(name: &str, passwd: &str, group: &str) -> Result<Self, UserError> {
        let number: Option<u32> = name.parse().ok();
        let entry = |line: &str| {
            let fields: Vec<&str> = line.split(':').collect();
            let &[user, _, uid, gid, ..] = fields.as_slice() else { return None };
            let (uid, gid): (u32, u32) = (uid.parse().ok()?, gid.parse().ok()?);
            (number == Some(uid) || user == name).then(|| (user.to_owned(), uid, gid))
        };
        let found = passwd.lines().find_map(entry);
        let (user, uid, gid) = found.ok_or_else(|| UserError::Unknown { name: name.to_owned() })?;
        if uid == 0 || gid == 0 {
            return Err(UserError::Root { name: name.to_owned() });
        }
        let member = |line: &str| {
            let fields: Vec<&str> = line.split(':').collect();
            let &[_, _, number, members] = fields.as_slice() else { return None };
            members.split(',').any(|member| member == user).then(|| number.parse().ok()).flatten()
        };
        let groups: BTreeSet<u32> = group.lines().filter_map(member).chain([gid]).collect();
        let groups = groups.into_iter().map(Gid::from_raw).collect();
        Ok(Self { uid: Uid::from_raw(uid), gid: Gid::from_raw(gid), groups })
    }

    pub(crate) const fn uid(&self) -> u32 {
        self.uid.as_raw()
    }

    /// Makes every thread of this process the user's, without capabilities, and ends the process when `parent` ends.
    /// `no_new_privs` is set already.
    ///
    /// # Errors
    /// [`UserError`]: the machine must not run.
    pub(crate) fn become_this(&self, parent: u32) -> Result<(), UserError> {
        if egm_address::fault!("privileges-kept") {
            return Ok(());
        }
        let step = |step| move |errno: nix::Error| UserError::Drop { step, source: errno.into() };
        // The C library does each for all threads.
        setgroups(&self.groups).map_err(step("set the groups of the user"))?;
        setresgid(self.gid, self.gid, self.gid).map_err(step("become the user's group"))?;
        setresuid(self.uid, self.uid, self.uid).map_err(step("become the user"))?;
        self.verify()?;
        follow(parent) // the kernel clears it when the user changes
    }

    /// Checks every thread by what the kernel reports of it (proc_pid_status(5)).
    fn verify(&self) -> Result<(), UserError> {
        let read =
            |source| UserError::Drop { step: "look at the privileges of this process's threads", source };
        for thread in fs::read_dir("/proc/self/task").map_err(read)? {
            let path = thread.map_err(read)?.path();
            let status = fs::read_to_string(path.join("status")).map_err(read)?;
            let thread = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            self.verify_thread(&thread, &status)?;
        }
        Ok(())
    }

    fn verify_thread(&self, thread: &str, status: &str) -> Result<(), UserError> {
        let all = |number: u32| [number; 4].map(|n| n.to_string()).join("\t");
        let groups: BTreeSet<String> = self.groups.iter().map(ToString::to_string).collect();
        let none = || "0".repeat(16);
        let expected = [
            ("Uid", all(self.uid.as_raw())),
            ("Gid", all(self.gid.as_raw())),
            ("CapPrm", none()),
            ("CapEff", none()),
            ("CapAmb", none()),
            ("NoNewPrivs", "1".to_owned()),
        ];
        let kept = |field, found: &str, expected: String| {
            let (thread, found) = (thread.to_owned(), found.to_owned());
            Err(UserError::Kept { thread, field, found, expected })
        };
        for (name, expected) in expected {
            let found = field(status, name);
            if found != expected {
                return kept(name, found, expected);
            }
        }
        let found = field(status, "Groups");
        match found.split_whitespace().all(|group| groups.contains(group)) {
            true => Ok(()),
            false => kept("Groups", found, groups.into_iter().collect::<Vec<_>>().join(" ")),
        }
    }
}

/// The value of `name` in the text of a thread's status.
fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let value = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':');
    status.lines().find_map(value).unwrap_or_default().trim()
}

/// Ends this process when its parent `parent` ends, which holds the slices' locks: without it they are free.
///
/// # Errors
/// [`UserError::Drop`]: `parent` has ended already, or the kernel refuses.
pub(crate) fn follow(parent: u32) -> Result<(), UserError> {
    let orphan = |source| UserError::Drop { step: "follow the parent process", source };
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|errno| orphan(errno.into()))?;
    if std::os::unix::process::parent_id() != parent {
        return Err(orphan(io::Error::other("it has ended")));
    }
    Ok(())
}

/// Keeps programs that this process executes from gaining privileges, in threads that start from now on.
pub(crate) fn gain_nothing() -> Result<(), UserError> {
    let set = set_no_new_privs(true);
    set.map_err(|errno| UserError::Drop { step: "set no_new_privs", source: errno.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tvcpu0\nUid:\t7\t7\t7\t7\nGid:\t8\t8\t8\t8\nGroups:\t8 9 \nNoNewPrivs:\t1\n\
        CapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapAmb:\t0000000000000000\n";

    #[test]
    fn a_thread_that_keeps_one_privilege_is_named() {
        let user =
            User { uid: Uid::from_raw(7), gid: Gid::from_raw(8), groups: [8, 9].map(Gid::from_raw).to_vec() };
        assert!(user.verify_thread("1", STATUS).is_ok());
        for (from, to, field) in [
            ("Uid:\t7\t7\t7\t7", "Uid:\t7\t7\t0\t7", "Uid"),
            ("Gid:\t8", "Gid:\t0", "Gid"),
            ("Groups:\t8 9", "Groups:\t0 8 9", "Groups"),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "NoNewPrivs"),
            ("CapEff:\t00", "CapEff:\t10", "CapEff"),
            ("CapPrm:\t00", "CapPrm:\t10", "CapPrm"),
        ] {
            let error = user.verify_thread("1", &STATUS.replace(from, to)).unwrap_err();
            assert!(matches!(error, UserError::Kept { field: found, .. } if found == field), "{error}");
            assert_eq!(error.blame(), Blame::Host);
        }
    }

    #[test]
    fn a_user_is_found_with_all_groups_and_root_is_refused() {
        let passwd = "root:x:0:0::/:/bin/sh\nbroken line\nvm:x:7:8::/:/bin/sh\nwheel:x:9:0::/:/bin/sh\n";
        let group = "root:x:0:\nvm:x:8:\nkvm:x:104:other,vm\negm:x:990:vmx\n";
        let find = |name| User::among(name, passwd, group);
        let user = User {
            uid: Uid::from_raw(7),
            gid: Gid::from_raw(8),
            groups: [8, 104].map(Gid::from_raw).to_vec(),
        };
        assert!(find("vm").is_ok_and(|found| found == user) && find("7").is_ok_and(|found| found == user));
        for root in ["root", "0", "wheel"] {
            assert!(matches!(find(root), Err(UserError::Root { .. })), "{root}");
        }
        for unknown in ["no such user", "", "10", "broken line"] {
            assert!(matches!(find(unknown), Err(UserError::Unknown { .. })), "{unknown}");
        }
    }
}
