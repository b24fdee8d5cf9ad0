//! The agent's words on the kernel command line.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::error::Broken;

/// End of the machine after the checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum End {
    #[default]
    PowerOff,
    Reset,
    Panic,
    Hang,
}

/// Arguments of checks, by key.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Arguments(BTreeMap<String, String>);

impl Arguments {
    /// From `KEY=VALUE` texts; a later one wins.
    pub(crate) fn from_pairs(pairs: &[String]) -> Result<Self, Broken> {
        pairs
            .iter()
            .map(|pair| match pair.split_once('=') {
                Some((key, value)) => Ok((key.to_owned(), value.to_owned())),
                None => Err(Broken::Argument(pair.clone(), "has no value: write KEY=VALUE")),
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// The arguments as `KEY=VALUE` texts, in the order of their keys.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = String> + '_ {
        self.0.iter().map(|(key, value)| format!("{key}={value}"))
    }

    /// The value of `key` as it was written.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// The value of `key`, or `otherwise` without one.
    pub(crate) fn get<T: FromStr>(&self, key: &str, otherwise: T) -> Result<T, Broken> {
        self.text(key).map_or(Ok(otherwise), |text| {
            text.parse().map_err(|_| Broken::Argument(format!("{key}={text}"), "is not what its check takes"))
        })
    }
}

/// The agent's part of the kernel command line.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Orders {
    /// `egm.checks=`: names in order; `None` means all.
    pub(crate) checks: Option<Vec<String>>,
    /// `egm.validate=`: what `egm-guest validate --select` takes; nothing is validated without it.
    pub(crate) validate: Vec<String>,
    /// `egm.doctor`: the lines of `egm-guest doctor` are reported too.
    pub(crate) doctor: bool,
    /// `egm.arg.KEY=VALUE`: arguments of checks; a later one of the same key wins.
    pub(crate) args: Arguments,
    /// `egm.exit=`: `poweroff` (the default), `reset`, `panic` or `hang`.
    pub(crate) end: End,
    /// `egm.shell`: a shell runs after the report; leaving it ends the machine.
    pub(crate) shell: bool,
    /// Words that start with `egm.` and mean nothing.
    pub(crate) unknown: Vec<String>,
}

impl Orders {
    /// Reads a kernel command line; double quotes hold a value with blanks together, as in the kernel.
    pub(crate) fn parse(line: &str) -> Self {
        let mut orders = Self::default();
        for word in words(line).iter().filter(|word| word.starts_with("egm.")) {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            match (key, value) {
                ("egm.checks", "none") => orders.checks = Some(Vec::new()),
                ("egm.checks", names) => {
                    orders.checks =
                        Some(names.split(',').filter(|n| !n.is_empty()).map(str::to_owned).collect());
                }
                ("egm.validate", words) => orders.validate = words.split(',').map(str::to_owned).collect(),
                ("egm.exit", "poweroff") => orders.end = End::PowerOff,
                ("egm.exit", "reset") => orders.end = End::Reset,
                ("egm.exit", "panic") => orders.end = End::Panic,
                ("egm.exit", "hang") => orders.end = End::Hang,
                ("egm.shell", _) => orders.shell = true,
                ("egm.doctor", _) => orders.doctor = true,
                _ => match key.strip_prefix("egm.arg.") {
                    Some(key) if !key.is_empty() => {
                        orders.args.0.insert(key.to_owned(), value.to_owned());
                    }
                    _ => orders.unknown.push(word.clone()),
                },
            }
        }
        orders
    }
}

/// The words of a kernel command line without their quotes.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in line.trim().chars() {
        match c {
            '"' => quoted = !quoted,
            c if c.is_whitespace() && !quoted => words.push(String::new()),
            c => {
                if let Some(word) = words.last_mut() {
                    word.push(c);
                }
            }
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_orders_are_picked_from_the_kernels_own_words() {
        let orders = Orders::parse(
            "console=ttyS0 egm.checks=cpus,numa egm.arg.net.peer=10.0.0.1 \"egm.arg.blk.signature=two words\" \
             egm.exit=reset egm.shell egm.doctor root=/dev/vda egm.chekcs=cpus egm.arg.x=\"a b\"\n",
        );
        assert_eq!(orders.checks.as_deref(), Some(&["cpus".to_owned(), "numa".to_owned()][..]));
        assert_eq!(orders.args.text("net.peer"), Some("10.0.0.1"));
        assert_eq!(orders.args.text("blk.signature"), Some("two words"));
        assert_eq!(orders.args.text("x"), Some("a b"));
        assert_eq!((orders.end, orders.shell, orders.doctor), (End::Reset, true, true));
        assert_eq!(orders.unknown, ["egm.chekcs=cpus"]);
    }

    #[test]
    fn without_orders_everything_is_checked_and_the_machine_powers_off() {
        assert_eq!(Orders::parse("console=ttyS0 quiet"), Orders::default());
        assert_eq!(Orders::default().end, End::PowerOff);
        assert_eq!(Orders::parse("egm.checks=none").checks, Some(Vec::new()));
    }

    #[test]
    fn an_argument_has_a_default_and_refuses_what_it_cannot_read() {
        let args = Arguments::from_pairs(&["vsock.port=99".into(), "fuzz.seed=x".into()]).unwrap();
        assert_eq!(args.get("vsock.port", 1024u32).unwrap(), 99);
        assert_eq!(args.get("other", 1024u32).unwrap(), 1024);
        assert!(args.get("fuzz.seed", 1u64).unwrap_err().to_string().contains("fuzz.seed=x"));
        assert!(Arguments::from_pairs(&["novalue".into()]).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_command_line_is_read(line in "\\PC{0,60}") {
            let _ = Orders::parse(&line);
        }
    }
}
