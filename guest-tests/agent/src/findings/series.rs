//! Parts of a series' name: the transfer, and the memory that it reaches.

/// Kind of memory. The discriminant is the number of its colour, so one kind has one colour in every plot of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum MemoryKind {
    Device,
    HostNuma,
    Pool,
    Pinned,
    Registered,
    Managed,
    System,
    EgmDevice,
    /// A NUMA node that processors use.
    Node,
    Peer,
    Other,
}

impl MemoryKind {
    /// The kind of memory with a name as series of `cuda` have it.
    fn named(name: &str) -> Self {
        const NAMES: [(&str, MemoryKind); 8] = [
            ("the GPU's memory", MemoryKind::Device),
            ("HOST_NUMA memory", MemoryKind::HostNuma),
            ("a pool", MemoryKind::Pool),
            ("pinned memory", MemoryKind::Pinned),
            ("registered memory", MemoryKind::Registered),
            ("managed memory", MemoryKind::Managed),
            ("system memory", MemoryKind::System),
            ("memory of the EGM device", MemoryKind::EgmDevice),
        ];
        NAMES.iter().find(|(start, _)| name.starts_with(start)).map_or(Self::Other, |(_, kind)| *kind)
    }
}

/// A series with both ends of its transfer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ends<'a> {
    /// `GPU 0 to GPU 1: SM read`: the GPU that acts, and the GPU with the memory.
    Pair { from: u32, to: u32 },
    /// `GPU 0, pinned memory: SM read`.
    Memory { name: &'a str, gpu: u32 },
}

/// Ends and transfer of a series about GPUs.
pub(crate) fn ends(series: &str) -> Option<(Ends<'_>, &str)> {
    let rest = series.strip_prefix("GPU ")?;
    if let Some((from, rest)) = rest.split_once(" to GPU ") {
        let (to, transfer) = rest.split_once(": ")?;
        return Some((Ends::Pair { from: from.parse().ok()?, to: to.parse().ok()? }, transfer));
    }
    let (gpu, rest) = rest.split_once(", ")?;
    let (name, transfer) = rest.split_once(": ")?;
    Some((Ends::Memory { name, gpu: gpu.parse().ok()? }, transfer))
}

/// Where a series stands in the plots of a group.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Series<'a> {
    /// The plot: the transfer, or the validation where the name has another form.
    pub(crate) plot: &'a str,
    /// The line in it: memory and GPU, or the whole series.
    pub(crate) line: &'a str,
    pub(crate) memory: MemoryKind,
}

impl<'a> Series<'a> {
    pub(crate) fn of(validation: &'a str, series: &'a str) -> Self {
        if let Some((ends, plot)) = ends(series) {
            let line = series.strip_suffix(plot).and_then(|line| line.strip_suffix(": ")).unwrap_or(series);
            let memory = match ends {
                Ends::Pair { .. } => MemoryKind::Peer,
                Ends::Memory { name, .. } => MemoryKind::named(name),
            };
            return Self { plot, line, memory };
        }
        match series.split_once(", ") {
            Some((plot, line)) if line.starts_with("node ") => Self { plot, line, memory: MemoryKind::Node },
            _ => Self { plot: validation, line: series, memory: MemoryKind::Other },
        }
    }
}

#[cfg(test)]
mod tests {
    use egm_vendor::cuda::Kind;

    use super::*;

    #[test]
    fn every_kind_of_memory_that_is_measured_has_its_own_colour() {
        let address = "0000:01:00.0".parse().unwrap();
        let kinds = [
            Kind::Device,
            Kind::HostNuma(1),
            Kind::Pool(1),
            Kind::Pinned,
            Kind::Registered,
            Kind::Managed,
            Kind::System,
            Kind::EgmDevice(address),
        ];
        let mut colours: Vec<u8> =
            kinds.iter().map(|kind| MemoryKind::named(&kind.to_string()) as u8).collect();
        assert!(!colours.contains(&(MemoryKind::Other as u8)), "{colours:?}");
        colours.sort_unstable();
        colours.dedup();
        assert_eq!(colours.len(), kinds.len());
    }

    #[test]
    fn a_series_has_a_plot_and_a_line() {
        let of = |series| Series::of("the.validation", series);
        let series = |plot, line, memory| Series { plot, line, memory };
        assert_eq!(
            of("GPU 0, HOST_NUMA memory of node 0: SM read"),
            series("SM read", "GPU 0, HOST_NUMA memory of node 0", MemoryKind::HostNuma)
        );
        assert_eq!(
            of("GPU 3, memory of the EGM device 0000:01:00.0: latency"),
            series("latency", "GPU 3, memory of the EGM device 0000:01:00.0", MemoryKind::EgmDevice)
        );
        assert_eq!(of("GPU 0 to GPU 1: SM read"), series("SM read", "GPU 0 to GPU 1", MemoryKind::Peer));
        assert_eq!(of("read, node 0, 32 threads"), series("read", "node 0, 32 threads", MemoryKind::Node));
        for other in ["rdma write", "GPU 0 alone: SM read", "GPU x, pinned memory: SM read", "GPU 0, latency"]
        {
            assert_eq!(of(other), series("the.validation", other, MemoryKind::Other));
        }
    }
}
