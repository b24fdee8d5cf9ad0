//! Rules of the virtual processors.

use egm_address::CpuSet;

use super::error::{Fault, Rule, in_range};
use super::file::{AffinityFile, CpusFile};
use super::rules::CpuRule;
use super::spec::{Cpus, MAX_VCPUS};

pub(super) fn resolve(file: CpusFile) -> Result<Cpus, Fault> {
    let topology = file.topology.unwrap_or_default();
    let part = |value: Option<u32>, key: &str| {
        in_range(value.unwrap_or(1), 1, MAX_VCPUS).map_err(|rule| rule.at(format!("topology.{key}")))
    };
    let (sockets, threads) = (part(topology.sockets, "sockets")?, part(topology.threads, "threads")?);
    let cores = match (topology.cores, file.count) {
        (None, Some(count)) => count.checked_div(sockets.saturating_mul(threads)).unwrap_or(0).max(1),
        (cores, _) => part(cores, "cores")?,
    };
    let product = u64::from(sockets).saturating_mul(u64::from(cores)).saturating_mul(u64::from(threads));
    let count = match file.count {
        Some(count) => in_range(count, 1, MAX_VCPUS).map_err(|rule| rule.at("count"))?,
        None => u32::try_from(product).unwrap_or(u32::MAX),
    };
    let count = in_range(count, 1, MAX_VCPUS).map_err(|rule| rule.at("topology"))?;
    if u64::from(count) != product {
        return Err(Rule::from(CpuRule::Topology { count, sockets, cores, threads, product }).at("topology"));
    }
    Ok(Cpus { count, sockets, cores, threads, affinity: affinity(file.affinity, count)? })
}

fn affinity(file: Option<AffinityFile>, count: u32) -> Result<Vec<CpuSet>, Fault> {
    let vcpus = usize::try_from(count).unwrap_or(usize::MAX);
    let lists = match file {
        None => return Ok(Vec::new()),
        Some(AffinityFile::All(list)) => vec![list; vcpus],
        Some(AffinityFile::Each(lists)) => lists,
    };
    if lists.len() != vcpus {
        return Err(Rule::from(CpuRule::Affinity { count, lists: lists.len() }).at("affinity"));
    }
    if lists.iter().any(CpuSet::is_empty) {
        return Err(Rule::EmptyList.at("affinity"));
    }
    Ok(lists)
}
