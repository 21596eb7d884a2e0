package metrics

import (
	"strconv"

	"github.com/outflowhq/outflow/internal/app/overview"
	"github.com/outflowhq/outflow/pipeline"
)

var (
	clusterInfo = describe("cluster_info", "1, with cluster.id and cluster.subscription as labels; the "+
		"latter is empty at a home, which publishes its own rows. No series where there is one database.",
		"cluster", "subscription")
	clusterOwner = describe("cluster_owner", "Where clusters share the stream: the number of the cluster "+
		"that makes it, by the record as this process read it last. Others stand by.")
	clusterEpoch = describe("cluster_epoch", "Where clusters share the stream: the epoch, which rises with "+
		"each change of owner.")
	watermarkTime = describe("cluster_watermark_timestamp_seconds", "When the newest watermark was written, "+
		"by the home's clock: by this home, or of those that were read of the home. A home that is idle "+
		"writes none. Not on a standby.")
	watermarkLSN = describe("cluster_watermark_confirmed_lsn", "LSN up to which the home has confirmed its "+
		"own WAL, as its newest watermark says.")
	homeBehind = describe("cluster_behind_events", "Events that the home's newest watermark counts and that "+
		"are not published here yet; with cluster.mode islands, up to which it is not settled here yet who "+
		"publishes them. Not at a home, nor before a watermark was compared. If the counts "+
		"differ there is a fault, cluster_count.")
	clusterAwaited = describe("cluster_awaited", "cluster.mode islands, at a home: 1 for each cluster, by "+
		"its number, whose answer it waits for before it publishes again. No series for others.", "cluster")
	clusterYielded = describe("cluster_yielded", "cluster.mode islands: 1 while the home leaves its events "+
		"to other clusters because its NATS could not be reached or took no message, or one of them did not "+
		"answer it, as this process has read.")
	clusterPublishes = describe("cluster_publishes", "At a reader: 1 while this cluster publishes for the "+
		"home. cluster.mode shared: it makes the home's stream. islands: it was the last to publish for the "+
		"home, and the home is silent since, or has yielded.")
	homeHeard = describe("cluster_heard_timestamp_seconds", "cluster.mode islands, at a reader: when the "+
		"home committed its newest sign of life that this process has read, by the home's clock.")
	homeUnsettled = describe("cluster_unsettled_wal_bytes", "cluster.mode islands, at a reader: WAL of the "+
		"home, up to its newest event that was read here, that it has not said to have published and that "+
		"no other cluster has claimed.")
	keptBytes = describe("cluster_kept_wal_bytes", "WAL that the slot keeps only because the home has not "+
		"confirmed its own. Not at a home.")
	keptSince = describe("cluster_kept_since_timestamp_seconds", "Since when the oldest WAL has been kept "+
		"that the slot keeps only because the home has not confirmed its own. No series while there is none.")
	subscriberRetained = describe("cluster_slot_retained_bytes", "WAL that PostgreSQL keeps for a slot by "+
		"which another program, as a rule another cluster's subscription, reads this database, by its "+
		"name. At most 64 slots.", "by")
	subscriberLost = describe("cluster_slot_lost", "1 if PostgreSQL has removed WAL that a slot by which "+
		"another cluster reads this database needed: that cluster lacks rows.", "by")
)

func (g gauges) cluster(c *overview.Cluster, s *pipeline.Status) {
	if c == nil {
		return
	}
	g.set(clusterInfo, 1, strconv.Itoa(c.ID), c.Subscription)
	for _, o := range c.Subscribers {
		g.set(subscriberRetained, float64(o.Retained), o.Slot)
		g.is(subscriberLost, o.Lost, o.Slot)
	}
	if s.Epoch > 0 {
		g.set(clusterOwner, float64(s.Owner))
		g.set(clusterEpoch, float64(s.Epoch))
	}
	if a := s.Agreed; c.Subscription != "" && (a != nil || s.Epoch > 0) {
		g.is(clusterPublishes, a != nil && a.Publishes || s.Epoch > 0 && s.Owner == c.ID)
	}
	if a := s.Agreed; a != nil {
		for _, n := range a.WaitsFor {
			g.set(clusterAwaited, 1, strconv.Itoa(n))
		}
		g.is(clusterYielded, a.Yielded)
		if c.Subscription != "" {
			g.time(homeHeard, a.Heard)
			g.set(homeUnsettled, float64(a.Unsettled))
		}
	}
	c.Knows(s.Said, s.Tally, s.Kept)
	if c.Watermark == nil {
		return
	}
	g.time(watermarkTime, c.Watermark.At)
	g.set(watermarkLSN, float64(c.Watermark.LSN))
	if c.Subscription == "" {
		return
	}
	if c.Counted != nil {
		g.set(homeBehind, float64(c.Behind))
	}
	g.set(keptBytes, float64(c.Kept.Bytes))
	g.time(keptSince, c.Kept.Since)
}
